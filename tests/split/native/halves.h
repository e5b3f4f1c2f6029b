/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests' upper halves call. */
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
#define HALF(h)                                                                                    \
    int h##_add(int, int);                                                                         \
    double h##_many(int, double, long, double, int, int, int, int, int, double, char);             \
    int h##_set_errno(int);                                                                        \
    long h##_count(void);                                                                          \
    int h##_local(void);                                                                           \
    int h##_order(void);                                                                           \
    int h##_ifunc(void);                                                                           \
    void *h##_malloc(size_t);                                                                      \
    void h##_free(void *);                                                                         \
    void *h##_mmap(size_t);                                                                        \
    void *h##_mmap_at(void *, size_t);                                                             \
    int h##_munmap(void *, size_t);                                                                \
    void *h##_mremap(void *, size_t, size_t);                                                      \
    void *h##_shmat(size_t);                                                                       \
    void *h##_dlopen(const char *);                                                                \
    void *h##_thread_stack(void);                                                                  \
    void h##_print(const char *);                                                                  \
    int h##_visit(int (*)(int, void *), int, void *);                                              \
    int h##_spin(volatile int *);                                                                  \
    int h##_stray(int (*)(int, void *));                                                           \
    int h##_background(void);                                                                      \
    int h##_fault(void);                                                                           \
    int h##_system(const char *);                                                                  \
    void h##_leave(int);
HALF(one)
HALF(two)
int side_ifunc(void), side_order(void), side_local(void);
long side_count(void);
#ifdef __cplusplus
}
#endif
