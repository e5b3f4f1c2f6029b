/* SPDX-License-Identifier: Apache-2.0 */
/* A stand-in for NVRTC, for where there is none: what it "compiles" stub_gpu.c knows by the kernel's name. */

#include <string.h>

typedef unsigned long long u64;

int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
int nvrtcCreateProgram(u64 *p, const char *source, const char *name, int n, void **h, void **i)
{
    return (void)h, (void)i, *p = 0x66, !source || !name || n;
}
int nvrtcCompileProgram(u64 p, int n, const char **options)
{
    return p != 0x66 || n != 2 || strcmp(options[0], "--gpu-architecture=sm_90");
}
int nvrtcGetProgramLogSize(u64 p, size_t *n) { return *n = 8, p != 0x66; }
int nvrtcGetProgramLog(u64 p, char *to) { return memcpy(to, "stand-in", 8), p != 0x66; }
int nvrtcGetCUBINSize(u64 p, size_t *n) { return *n = 5, p != 0x66; }
int nvrtcGetCUBIN(u64 p, char *to) { return memcpy(to, "stub", 5), p != 0x66; }
