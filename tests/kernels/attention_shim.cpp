// The attention kernels of one spec on emulated thread blocks (emulated/), compiled with g++, and the merge.
// spec_mask_spec.h is the spec's own.
#define EMULATED_BESIDE_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <memory>

#include "flashinfer_warp.h"

// From here on what is compiled is code for a GPU. 8.6: from 9.0 on there is more PTX in it.
#define __CUDA_ARCH__ 860
#include "stream.cuh"
#undef __CUDA_ARCH__
#undef __shared__
#define __shared__ static  // one block runs at a time
#include "merge.cuh"

using namespace spec_mask;

namespace {

template <MaskMode MODE, uint32_t TILE_Q>
void attention(const Params& p, uint32_t grid, uint32_t seed) {
  using Layout = StreamLayout<TILE_Q>;
  // As 16-byte words: rows of it are read by as many bytes at once.
  std::vector<uint4> smem(Layout::kSmem / 16 + 1);
  emulated::launch(grid * p.num_kv_heads, {Layout::kThreads, 1, 1}, seed, [&] {
    StreamKernel<MODE, TILE_Q>(p, reinterpret_cast<uint8_t*>(smem.data())).run();
  });
}

void merge(const Params& p, const PlanArrays& plan, const MergeLaunch& m, float* lse, int32_t num_rows, uint32_t seed) {
  const auto kernel = merge_kernel<kHeadDim, DTypeQ>(m);
  emulated::launch(m.blocks, {static_cast<uint32_t>(32 * m.block_warps), 1, 1}, seed, [&] {
    kernel(p.partial_o, p.lse, plan.header, plan.merge_rows, p.o, lse, num_rows, static_cast<int32_t>(p.num_qo_heads));
  });
}

}  // namespace

extern "C" {

const char* fault() { return emulated::last_fault.c_str(); }

// As run() of csrc/binding.cu, on contiguous tensors. Strides in elements.
int32_t run(int32_t mode, const PlanShape* shape_, int32_t* buffer, void* partial_o, float* partial_lse, void* q,
            void* k_cache, void* v_cache, const int64_t* kv_strides, int32_t hnd, int64_t pages, int32_t page_size,
            int32_t* page_table, const uint64_t* mask, void* out, float* out_lse, int32_t num_rows, float sm_scale,
            float k_scale, float v_scale, float soft_cap, uint32_t seed) {
  const PlanShape& shape = *shape_;
  const PlanArrays plan = plan_arrays(shape, buffer);
  Params p{};
  p.q = static_cast<DTypeQ*>(q);
  p.k_cache = static_cast<DTypeKV*>(k_cache);
  p.v_cache = static_cast<DTypeKV*>(v_cache);
  p.page_table = page_table;
  if (!use_cache(p, pages, page_size, kv_strides[0], kv_strides[hnd ? 2 : 1], kv_strides[hnd ? 1 : 2])) return 1;
  use_plan(p, shape, plan);
  p.q_stride_row = p.num_qo_heads * kHeadDim;
  p.q_stride_head = kHeadDim;
  p.mask_words = mask;
  p.sm_scale = sm_scale;
  p.k_scale = k_scale;
  p.v_scale = v_scale;
  p.logits_soft_cap = soft_cap;
  p.o = static_cast<DTypeQ*>(out);
  p.partial_o = static_cast<DTypeQ*>(partial_o);
  p.lse = p.partition_kv ? partial_lse : out_lse;
  return emulated::guarded([&] {
    bool found = false;
#define SPEC_MASK_CASE(MODE, TILE_Q)                                                           \
  if (mode == static_cast<int32_t>(MaskMode::MODE) && shape.tile_q == TILE_Q) {                \
    attention<MaskMode::MODE, TILE_Q>(p, shape.grid, seed);                                    \
    found = true;                                                                              \
  }
    SPEC_MASK_UNITS(SPEC_MASK_CASE)
#undef SPEC_MASK_CASE
    if (!found) throw emulated::Fault("no such kernel");
    if (p.partition_kv) {
      const int64_t pairs = static_cast<int64_t>(num_rows) * p.num_qo_heads;
      merge(p, plan, merge_launch(shape, pairs, kHeadDim), out_lse, num_rows, seed);
    }
  });
}

// Four fp8 elements as keys and as values: four words of two fp16. Returns the power of two that they lack.
int32_t convert(uint32_t x, uint32_t* words) {
  if constexpr (sizeof(DTypeKV) == 1) {
    Fp8Words<DTypeKV>::values(x, words[0], words[1]);
    Fp8Words<DTypeKV>::keys(x, words[2], words[3]);
  }
  return Fp8Words<DTypeKV>::kShift;
}

// KV tokens of one iteration of a kernel, or 0.
int32_t tile_kv(int32_t mode, int32_t tile_q) {
#define SPEC_MASK_CASE(MODE, TILE_Q)                                                           \
  if (mode == static_cast<int32_t>(MaskMode::MODE) && tile_q == TILE_Q) {                      \
    return StreamLayout<TILE_Q>::kTileKv;                                                      \
  }
  SPEC_MASK_UNITS(SPEC_MASK_CASE)
#undef SPEC_MASK_CASE
  return 0;
}
}
