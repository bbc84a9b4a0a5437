// In place of CUDA's, which needs nvcc: what FlashInfer's template uses of it.
#pragma once

#include <cuda_runtime.h>

namespace cooperative_groups {

struct thread_block {
  void sync() const { __syncthreads(); }
};
inline thread_block this_thread_block() { return {}; }

}  // namespace cooperative_groups
