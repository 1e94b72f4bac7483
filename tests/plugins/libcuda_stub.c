/* A CUDA driver that launches nothing and remembers what it was asked: for the C++ plugins and for benchmarks/gpu_check.py
 * on a machine without one. */
#include <stddef.h>
#include <string.h>

struct Launch { unsigned grid[3], threads, shared_bytes; int limit; const char* name; };
struct Launch stubLastLaunch;
int stubNumArguments; /* set by the harness */
int stubArguments[32]; /* the first four bytes of each */

int cuCtxGetCurrent(void** context) { *context = &stubLastLaunch; return 0; }
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuModuleLoadData(void** module, const void* image)
{
    *module = (void*) image;
    int const isCubin = *(const unsigned*) image == 0x464c457f;
    return isCubin || strstr((const char*) image, ".visible .entry") != NULL ? 0 : 200;
}
int cuModuleGetFunction(void** function, void* module, const char* name) { *function = (void*) name; return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { stubLastLaunch.limit = attribute == 8 ? value : -1; return 0; }
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
    unsigned shared_bytes, void* stream, void** arguments, void** extra)
{
    struct Launch launch = {{x, y, z}, threads, shared_bytes, stubLastLaunch.limit, (const char*) function};
    stubLastLaunch = launch;
    for (int i = 0; i < stubNumArguments; ++i) { stubArguments[i] = *(const int*) arguments[i]; }
    return ty == 1 && tz == 1 && extra == NULL ? 0 : 1;
}
