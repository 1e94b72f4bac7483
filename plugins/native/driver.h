// The CUDA driver, found at run time: the library builds and loads on machines without one.
#pragma once

#include "specification.h"

#include <cuda.h>

namespace furcate
{

struct Grid
{
    unsigned x, y, z;
};

// Architecture of the current context's device times ten, or 0 without a driver.
std::int32_t currentArch();

// 0, or what went wrong as a driver code; says so on stderr. A kernel is loaded once per context.
std::int32_t launch(Kernel const& kernel, Grid grid, void** arguments, CUstream stream);

} // namespace furcate
