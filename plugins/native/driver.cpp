#include "driver.h"

#include <cstdio>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <utility>

namespace furcate
{
namespace
{

constexpr std::int32_t kNO_DRIVER = 100; // CUDA_ERROR_NO_DEVICE

// The few entry points in use, under the names that the library exports.
struct Driver
{
    decltype(&cuCtxGetCurrent) ctxGetCurrent{};
    decltype(&cuCtxGetDevice) ctxGetDevice{};
    decltype(&cuDeviceGetAttribute) deviceGetAttribute{};
    decltype(&cuModuleLoadData) moduleLoadData{};
    decltype(&cuModuleGetFunction) moduleGetFunction{};
    decltype(&cuFuncSetAttribute) funcSetAttribute{};
    decltype(&cuLaunchKernel) launchKernel{};
    bool isComplete{};

    Driver()
    {
        void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr)
        {
            std::fprintf(stderr, "furcate: the CUDA driver cannot be loaded: %s\n", dlerror());
            return;
        }
        isComplete = find(library, "cuCtxGetCurrent", ctxGetCurrent) && find(library, "cuCtxGetDevice", ctxGetDevice)
            && find(library, "cuDeviceGetAttribute", deviceGetAttribute)
            && find(library, "cuModuleLoadData", moduleLoadData)
            && find(library, "cuModuleGetFunction", moduleGetFunction)
            && find(library, "cuFuncSetAttribute", funcSetAttribute) && find(library, "cuLaunchKernel", launchKernel);
    }

    template <typename Function>
    static bool find(void* library, char const* name, Function& function)
    {
        function = reinterpret_cast<Function>(dlsym(library, name));
        return function != nullptr;
    }
};

Driver const& driver()
{
    static Driver const found;
    return found;
}

std::int32_t failed(char const* call, Kernel const& kernel, CUresult code)
{
    std::fprintf(stderr, "furcate: %s of %s for sm_%d gave CUDA error %d\n", call, kernel.name, kernel.arch, code);
    return code;
}

std::int32_t load(Kernel const& kernel, CUfunction& function)
{
    static std::mutex mutex;
    static std::map<std::pair<CUcontext, Kernel const*>, CUfunction> loaded;
    CUcontext context{};
    driver().ctxGetCurrent(&context);
    std::lock_guard<std::mutex> const lock(mutex);
    auto const known = loaded.find({context, &kernel});
    if (known != loaded.end())
    {
        function = known->second;
        return 0;
    }
    CUmodule module{};
    CUresult code = driver().moduleLoadData(&module, kernel.cubin);
    if (code != CUDA_SUCCESS)
    {
        return failed("cuModuleLoadData", kernel, code);
    }
    code = driver().moduleGetFunction(&function, module, kernel.name);
    if (code != CUDA_SUCCESS)
    {
        return failed("cuModuleGetFunction", kernel, code);
    }
    // Above 48 KB a kernel must ask: the reason why this route can run the larger tactics.
    code = driver().funcSetAttribute(
        function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.sharedBytes);
    if (code != CUDA_SUCCESS)
    {
        return failed("cuFuncSetAttribute", kernel, code);
    }
    loaded[{context, &kernel}] = function;
    return 0;
}

} // namespace

std::int32_t currentArch()
{
    CUdevice device{};
    if (!driver().isComplete || driver().ctxGetDevice(&device) != CUDA_SUCCESS)
    {
        return 0;
    }
    int major{};
    int minor{};
    driver().deviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    driver().deviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
    return 10 * major + minor;
}

std::int32_t launch(Kernel const& kernel, Grid grid, void** arguments, CUstream stream)
{
    if (!driver().isComplete)
    {
        return kNO_DRIVER;
    }
    CUfunction function{};
    if (std::int32_t const code = load(kernel, function))
    {
        return code;
    }
    CUresult const code = driver().launchKernel(function, grid.x, grid.y, grid.z, kernel.numThreads, 1, 1,
        kernel.sharedBytes, stream, arguments, nullptr);
    return code == CUDA_SUCCESS ? 0 : failed("cuLaunchKernel", kernel, code);
}

} // namespace furcate
