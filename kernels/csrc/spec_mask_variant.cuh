// Kernel parameters and attention variant of verify attention over a paged KV cache.
//
// This file plugs into FlashInfer's FA2 prefill template: `SpecMaskParams` carries the fields the
// template reads, `SpecMaskAttention` is the variant it calls for lengths, logits, masks and
// output. No template code is repeated here.
//
// What a row sees. Request i has q_len rows, the queries of its last q_len KV tokens (the draft
// block: the last accepted token and the draft tokens after it). Row r sees KV token t if
//     t < kv_len - q_len                                     (everything before the draft block)
//     or bit t - (kv_len - q_len) of mask_words[row] is set  (the draft block, up to 64 tokens)
// and, with a sliding window of window_left, t >= kv_len - q_len + r - window_left.
// Under MaskMode::kCausal the template also applies the causal mask, and only its last KV tiles
// evaluate the variant: tree masks are subsets of the causal order, so they are free on the
// prefix. "Last" means from the first row of the query tile on, so with more than one query tile
// the later ones skip KV tiles that still lie in the draft block: words under kCausal need all
// rows of a request in one query tile. MaskMode::kCustom evaluates every tile and takes any bits;
// causal_words then supplies the causal order. MaskMode::kNone evaluates no tile fully inside the
// request, so it is the mode for draft blocks that see all of each other.
//
// Words are compiled in or not. Asking for each logit whether there are any is a branch for each: it
// made the tile of the draft block, which every request has and which is all that a CTA of a short one
// works on, as long as two others (sm_90, bf16, 64 rows: 1,958 instructions in the main loop, 827 without).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <flashinfer/attention/variant_helper.cuh>
#include <flashinfer/fastdiv.cuh>
#include <flashinfer/math.cuh>
#include <flashinfer/page.cuh>

namespace spec_mask {

// Where the attention kernel writes; converts to the pointer that the template asks for once, in
// its prologue. Whether a batch is split is known on the device only. When it is not, a request's
// one "partial" output goes where the output belongs, and the merge has nothing to add. Bits are
// the same either way: a merge of one partial output multiplies it by one. The LSEs stay with the
// partial ones, in output order, because a pointer that is not a kernel parameter would cost
// registers until the epilogue; the merge copies them if they are wanted.
template <typename DTypeO>
struct OutputPointer {
  const int32_t* direct;  // PlanHeader::direct
  DTypeO* partial;
  DTypeO* output;

  __device__ __forceinline__ operator DTypeO*() const { return *direct != 0 ? output : partial; }
};

template <typename DTypeQ_, typename DTypeKV_>
struct SpecMaskParams {
  using DTypeQ = DTypeQ_;
  using DTypeKV = DTypeKV_;
  using DTypeO = DTypeQ_;
  using IdType = int32_t;

  DTypeQ* q;                                       // [rows, num_qo_heads, head_dim], strided
  flashinfer::paged_kv_t<DTypeKV, IdType> paged_kv;  // indices = the page table as it is
  IdType* q_indptr;                                // [max_requests] first row of each request
  OutputPointer<DTypeO> o;
  float* lse;                                      // base-2 LSE, same rows as o; may be null
  flashinfer::uint_fastdiv group_size;
  uint32_t num_qo_heads;
  uint32_t num_kv_heads;     // CTAs of one plan entry, see attention_kernel
  IdType q_stride_n;
  IdType q_stride_h;
  // NVFP4 scale strides: the template loads them for every KV dtype and uses them for FP4 only.
  uint32_t k_sf_stride_page, k_sf_stride_n, k_sf_stride_h;
  uint32_t v_sf_stride_page, v_sf_stride_n, v_sf_stride_h;
  int32_t window_left;  // -1: none

  IdType* request_indices;   // [grid]
  IdType* qo_tile_indices;   // [grid]
  IdType* kv_tile_indices;   // [grid]
  IdType* o_indptr;          // [max_requests + 1]
  IdType* merge_indptr;      // unused: merge.cuh reads MergeRow
  bool* block_valid_mask;    // [grid]; also set without split, so padded CTAs always exit
  IdType* kv_chunk_size_ptr;
  uint32_t max_total_num_rows;
  uint32_t* total_num_rows;
  uint32_t padded_batch_size;
  bool partition_kv;

  // Beyond the template's own fields.
  const int32_t* q_len;       // [max_requests], owned by the plan
  const int32_t* kv_len;      // [max_requests], owned by the plan
  const uint64_t* mask_words; // [rows], or null: causal / all visible according to the mask mode
  bool causal_words;          // row r sees no block token after token r, whatever its word says
  const float* k_scale_ptr;   // device scalar multiplied onto k_scale, or null
  const float* v_scale_ptr;   // device scalar multiplied onto v_scale, or null
  float sm_scale;             // softmax scale without the KV scales
  float k_scale;
  float v_scale;
  float logits_soft_cap;      // read only if the module was built with soft cap

  __host__ __device__ __forceinline__ uint32_t get_qo_len(uint32_t i) const { return q_len[i]; }
  __host__ __device__ __forceinline__ uint32_t get_kv_len(uint32_t i) const { return kv_len[i]; }
};

// All are compile-time: each costs instructions on every logit, words on those of masked tiles.
template <bool USE_WINDOW, bool USE_SOFT_CAP, bool USE_WORDS>
struct SpecMaskAttention : flashinfer::AttentionVariantBase {
  static constexpr bool use_softmax = true;

  // The template works on logits times this. It is 1 because LogitsTransform already returns
  // scaled base-2 logits: FlashInfer's stand-in for minus infinity is -5e4 and is compared with
  // the logits *before* this factor, so a stock variant drops rows whose raw dot products are
  // below -5e4 (at head_dim 128 that is a scaled logit of about -4400). Scaled, it is -34657.
  static constexpr float sm_scale_log2 = 1.f;

  const uint64_t* words;  // mask words of this request, or null; with USE_WORDS
  uint32_t qo_len, kv_len, window_left;
  float logits_scale;     // to base-2 logits, or to the argument of tanh with soft cap
  float soft_cap_log2;

  template <typename Params>
  __device__ __host__ SpecMaskAttention(const Params& params, uint32_t batch_idx, uint8_t*) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    if constexpr (USE_WINDOW) {
      if (params.window_left >= 0) window_left = params.window_left;
    }
    if constexpr (USE_WORDS) {
      words = params.mask_words != nullptr ? params.mask_words + params.q_indptr[batch_idx] : nullptr;
    }
    float k_scale = params.k_scale;
    if (params.k_scale_ptr != nullptr) k_scale *= *params.k_scale_ptr;
    if constexpr (USE_SOFT_CAP) {
      // 2 log2(e): tanh below is written with exp2.
      logits_scale = 2.f * flashinfer::math::log2e * params.sm_scale * k_scale /
                     params.logits_soft_cap;
      soft_cap_log2 = flashinfer::math::log2e * params.logits_soft_cap;
    } else {
      logits_scale = flashinfer::math::log2e * params.sm_scale * k_scale;
      soft_cap_log2 = 0.f;
    }
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if constexpr (USE_SOFT_CAP) {
      // tanh(x) = 1 - 2 / (exp(2x) + 1), exact to about 1e-7. The tanh.approx instruction is off
      // by up to 5e-4, which a soft cap of 50 turns into an error of 2.5% of a probability. At
      // both ends it saturates: exp2 gives 0 or infinity, and the quotient 2 or 0.
      const float e = flashinfer::math::ptx_exp2(logits * logits_scale);
      return soft_cap_log2 * (1.f - 2.f * flashinfer::math::ptx_rcp(e + 1.f));
    } else {
      return logits * logits_scale;
    }
  })

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    bool visible = true;
    if constexpr (USE_WINDOW) {
      visible = kv_idx + qo_len + window_left >= kv_len + qo_idx;
    }
    if constexpr (USE_WORDS) {
      if (words != nullptr) {
        // Position in the draft block; negative on the prefix. kv_len may be below q_len, then the
        // block starts before token 0.
        const int32_t j = static_cast<int32_t>(kv_idx + qo_len) - static_cast<int32_t>(kv_len);
        if (j >= 0) {
          // A tile has packed rows past the request's last one; their words belong to others.
          visible = visible && qo_idx < qo_len && ((__ldg(words + qo_idx) >> (j & 63)) & 1) &&
                    (!params.causal_words || j <= static_cast<int32_t>(qo_idx));
        }
      }
    }
    return visible;
  })

  // A row that saw nothing still carries the stand-in -5e4, under which masked logits count as
  // exp2(0) = 1. Make it a real minus infinity: output 0, LSE -inf, weight 0 in the merge.
  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    if (m <= -flashinfer::math::inf) {
      m = -INFINITY;
      d = 1.f;
    }
  })

  // Read when it is used: a member would hold a register through the main loop.
  template <typename Params>
  __device__ __forceinline__ static float scale_of_v(const Params& params) {
    return params.v_scale_ptr != nullptr ? params.v_scale * __ldg(params.v_scale_ptr)
                                         : params.v_scale;
  }

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    const float d_rcp = m > -flashinfer::math::inf ? flashinfer::math::ptx_rcp(d) : 0.f;
    return output * (d_rcp * scale_of_v(params));
  })
};

}  // namespace spec_mask
