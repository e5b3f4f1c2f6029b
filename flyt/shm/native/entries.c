// SPDX-License-Identifier: Apache-2.0
// The short way's calls as builtins of Python: half of what such a call cost was ctypes, turning arguments over.
//
// Made at run time from CPython's stable ABI (METH_FASTCALL is in it since 3.10), whose functions entries.py finds and
// hands over: this library is still built without Python's headers, once for every Python. Called with the GIL held.
//
// `self` is the address of an express_t, as an int. An argument that is no number, or is out of its range, makes it
// ELSEWHERE: nothing has happened, and the general way says what is wrong with it.

#include <stdint.h>

#include "express.h"

typedef struct object object_t; // PyObject

typedef struct { // PyMethodDef
    const char *name;
    object_t *(*call)(object_t *self, object_t *const *given, intptr_t count);
    int flags;
    const char *doc;
} method_t;

enum { FASTCALL = 0x80 }; // METH_FASTCALL

typedef struct { // in the order of flyt/shm/native/entries.py
    unsigned long long (*word)(object_t *);
    intptr_t (*number)(object_t *); // of an int: PyLong_AsLongLong would ask a program's __index__
    object_t *(*made)(long long);
    intptr_t (*length)(object_t *); // of bytes
    char *(*bytes)(object_t *);
    intptr_t (*places)(object_t *); // of a tuple
    object_t *(*place)(object_t *, intptr_t);
    object_t *(*error)(void);
    void (*clear)(void);
} python_t;

static python_t python;

// Arguments one after the other; the first that is wrong makes `bad`.
typedef struct {
    object_t *const *next;
    int bad;
} reader_t;

static uint64_t word(reader_t *r) {
    uint64_t value = r->bad ? 0 : python.word(*r->next++);
    r->bad |= value == UINT64_MAX; // an error, or a number that is no address and no size
    return value;
}

static int64_t number(reader_t *r) {
    int64_t value = r->bad ? 0 : python.number(*r->next++);
    r->bad |= value == -1 && python.error();
    return value;
}

static const char *bytes(reader_t *r, uint64_t *size) {
    const char *at = r->bad ? NULL : python.bytes(*r->next);
    *size = at ? (uint64_t)python.length(*r->next++) : 0;
    r->bad |= !at;
    return at;
}

// A tuple of three numbers.
static void three(reader_t *r, uint32_t *to) {
    r->bad |= !r->bad && python.places(*r->next) != 3;
    for (intptr_t i = 0; i < 3 && !r->bad; i++) {
        uint64_t value = python.word(python.place(*r->next, i));
        r->bad |= value > UINT32_MAX;
        to[i] = (uint32_t)value;
    }
    r->next++;
}

static object_t *elsewhere(void) {
    if (python.error())
        python.clear();
    return python.made(ELSEWHERE);
}

// `count` arguments, and the express_t; a call of another shape is a mistake in this project, not of its user.
#define ENTER(count)                                                                                                  \
    reader_t r = {given, 0};                                                                                          \
    if (had != (count))                                                                                               \
        return elsewhere();                                                                                           \
    express_t *e = (express_t *)(uintptr_t)python.word(self);

static object_t *in(object_t *self, object_t *const *given, intptr_t had) {
    ENTER(7)
    uint64_t address = word(&r), host = word(&r), size = word(&r);
    int64_t stream = number(&r), waits = number(&r);
    uint64_t ns = word(&r);
    int64_t yield = number(&r);
    if (r.bad || !size)
        return elsewhere();
    return python.made(flyt_express_in(e, address, host, size, stream, waits != 0, ns, yield != 0));
}

static object_t *out(object_t *self, object_t *const *given, intptr_t had) {
    ENTER(8)
    uint64_t host = word(&r), address = word(&r), size = word(&r);
    int64_t stream = number(&r), waits = number(&r);
    uint64_t ns = word(&r);
    int64_t yield = number(&r);
    uint64_t call = word(&r);
    if (r.bad || !size)
        return elsewhere();
    return python.made(flyt_express_out(e, host, address, size, stream, waits != 0, ns, yield != 0, call));
}

static object_t *fill(object_t *self, object_t *const *given, intptr_t had) {
    ENTER(4)
    uint64_t address = word(&r);
    int64_t value = number(&r);
    uint64_t size = word(&r);
    int64_t stream = number(&r);
    if (r.bad || !size || value != (int32_t)value)
        return elsewhere();
    return python.made(flyt_express_fill(e, address, value & 0xFF, size, stream));
}

static object_t *part(object_t *self, object_t *const *given, intptr_t had) {
    ENTER(5)
    uint64_t address = word(&r), index = word(&r), size = word(&r), stream = word(&r), to = word(&r);
    if (r.bad)
        return elsewhere();
    return python.made(flyt_express_part(e, address, index, size, stream, (uint64_t *)(uintptr_t)to));
}

static object_t *launch(object_t *self, object_t *const *given, intptr_t had) {
    ENTER(6)
    uint32_t shape[7];
    uint64_t size, kernel = word(&r);
    three(&r, shape);
    three(&r, shape + 3);
    uint64_t shared = word(&r), stream = word(&r);
    const char *params = bytes(&r, &size);
    if (r.bad || shared > UINT32_MAX)
        return elsewhere();
    shape[6] = (uint32_t)shared;
    return python.made(flyt_express_launch(e, (const kernel_t *)(uintptr_t)kernel, shape, stream, params, size));
}

static object_t *sync(object_t *self, object_t *const *given, intptr_t had) {
    ENTER(4)
    uint64_t stream = word(&r), last = word(&r), ns = word(&r);
    int64_t yield = number(&r);
    if (r.bad)
        return elsewhere();
    return python.made(flyt_express_sync(e, stream, last, ns, yield != 0));
}

static method_t methods[] = {
    {"express_in", in, FASTCALL, "flyt_express_in"},
    {"express_out", out, FASTCALL, "flyt_express_out"},
    {"express_fill", fill, FASTCALL, "flyt_express_fill"},
    {"express_part", part, FASTCALL, "flyt_express_part"},
    {"express_launch", launch, FASTCALL, "flyt_express_launch"},
    {"express_sync", sync, FASTCALL, "flyt_express_sync"},
};

// The entry's PyMethodDef; NULL behind the last. `functions` are those of python_t.
method_t *flyt_entry(const python_t *functions, uint64_t index) {
    python = *functions;
    return index < sizeof methods / sizeof *methods ? &methods[index] : NULL;
}
