// The attention kernels of one spec on emulated thread blocks (emulated/): FlashInfer's FA2 template and our
// variant, compiled with g++, and the merge. spec_mask_spec.h is the spec's own.
#define EMULATED_BESIDE_CUDA
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <memory>

#include "flashinfer_warp.h"

// From here on what is compiled is code for a GPU. 8.6: from 9.0 on there is more PTX in it.
#define __CUDA_ARCH__ 860
#include "attention.cuh"
#undef __CUDA_ARCH__
#undef __shared__
#define __shared__ static  // one block runs at a time
#include "merge.cuh"

using namespace spec_mask;

namespace {

template <MaskMode MODE, uint32_t TILE_Q>
void attention(const Params& p, uint32_t seed) {
  using Traits = TraitsFor<MODE, TILE_Q, pick_mma_kv<MODE, TILE_Q>()>;
  using Storage = typename Traits::SPEC_MASK_SHARED_STORAGE;
  const auto storage = std::make_unique<Storage>();
  const dim3 threads(32, Traits::NUM_WARPS_Q, Traits::NUM_WARPS_KV);
  emulated::launch(p.padded_batch_size * p.num_kv_heads, threads, seed,
                   [&] { detail::attention_block<Traits>(p, *storage); });
}

template <int WARPS>
void merge(const Params& p, const PlanArrays& plan, float* lse, int32_t num_rows, int32_t blocks, uint32_t seed) {
  emulated::launch(blocks, {kMergeThreads, 1, 1}, seed, [&] {
    merge_partials<kHeadDim, WARPS, DTypeQ>(p.o.partial, p.lse, plan.header, plan.merge_rows, p.o.output, lse,
                                            num_rows, static_cast<int32_t>(p.num_qo_heads));
  });
}

}  // namespace

extern "C" {

const char* fault() { return emulated::last_fault.c_str(); }

// As run() of csrc/binding.cu, on contiguous tensors. Strides in elements.
int32_t run(int32_t mode, int32_t causal_words, const PlanShape* shape_, int32_t* buffer, void* partial_o,
            float* partial_lse, void* q, void* k_cache, void* v_cache, const int64_t* kv_strides, int32_t hnd, int32_t page_size,
            int32_t* page_table, int32_t table_rows, const uint64_t* mask, void* out, float* out_lse,
            int32_t num_rows, float sm_scale, float k_scale, float v_scale, float soft_cap, uint32_t seed) {
  const PlanShape& shape = *shape_;
  const PlanArrays plan = plan_arrays(shape, buffer);
  Params p{};
  p.q = static_cast<DTypeQ*>(q);
  p.paged_kv = flashinfer::paged_kv_t<DTypeKV, int32_t>(
      shape.num_kv_heads, page_size, kHeadDim, table_rows, hnd ? flashinfer::QKVLayout::kHND : flashinfer::QKVLayout::kNHD,
      static_cast<DTypeKV*>(k_cache), static_cast<DTypeKV*>(v_cache), kv_strides, page_table, plan.page_indptr,
      /*last_page_len=*/nullptr);
  use_plan(p, shape, plan);
  p.q_stride_n = p.num_qo_heads * kHeadDim;
  p.q_stride_h = kHeadDim;
  p.mask_words = mask;
  p.causal_words = causal_words;
  p.sm_scale = sm_scale;
  p.k_scale = k_scale;
  p.v_scale = v_scale;
  p.logits_soft_cap = soft_cap;
  p.o.output = static_cast<DTypeQ*>(out);
  p.o.partial = p.partition_kv ? static_cast<DTypeQ*>(partial_o) : p.o.output;
  p.lse = p.partition_kv ? partial_lse : out_lse;
  return emulated::guarded([&] {
    bool found = false;
#define SPEC_MASK_CASE(MODE, TILE_Q)                                                           \
  if (mode == static_cast<int32_t>(MaskMode::MODE) && shape.tile_q == TILE_Q) {                \
    attention<MaskMode::MODE, TILE_Q>(p, seed);                                                \
    found = true;                                                                              \
  }
    SPEC_MASK_UNITS(SPEC_MASK_CASE)
#undef SPEC_MASK_CASE
    if (!found) throw emulated::Fault("no such kernel");
    if (p.partition_kv) {
      const MergeLaunch m = merge_launch(static_cast<int64_t>(num_rows) * p.num_qo_heads, 2);
      const auto kernel = m.warps == 16 ? merge<16> : m.warps == 4 ? merge<4> : merge<1>;
      kernel(p, plan, out_lse, num_rows, m.blocks, seed);
    }
  });
}

// KV tokens of one iteration of a kernel, or 0.
int32_t tile_kv(int32_t mode, int32_t tile_q) {
#define SPEC_MASK_CASE(MODE, TILE_Q)                                                           \
  if (mode == static_cast<int32_t>(MaskMode::MODE) && tile_q == TILE_Q) {                      \
    return TraitsFor<MaskMode::MODE, TILE_Q, pick_mma_kv<MaskMode::MODE, TILE_Q>()>::CTA_TILE_KV; \
  }
  SPEC_MASK_UNITS(SPEC_MASK_CASE)
#undef SPEC_MASK_CASE
  return 0;
}
}
