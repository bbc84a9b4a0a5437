// The module's exported functions: shape, info, plan and run.
//
// Python checks dtypes, shapes and devices before it calls (spec_mask.py); what is checked again
// here is only what would otherwise corrupt memory.
#include <cuda_runtime.h>

#include <cstdint>

#include "block_team.cuh"
#include "merge.cuh"
#include "params.cuh"
#include "tvm/ffi/container/array.h"
#include "tvm_ffi_utils.h"

using tvm::ffi::Array;
using tvm::ffi::Optional;

namespace spec_mask {

// (mode, tile) pairs in this module; generated: X(kCausal, 16) X(kCausal, 64) ...
#define SPEC_MASK_DECLARE(MODE, TILE_Q)                                                      \
  template <>                                                                                \
  cudaError_t launch_attention<MaskMode::MODE, TILE_Q>(const Params&, uint32_t, uint32_t,    \
                                                       cudaStream_t);                        \
  template <>                                                                                \
  cudaError_t attention_info<MaskMode::MODE, TILE_Q>(KernelInfo*);
SPEC_MASK_UNITS(SPEC_MASK_DECLARE)
#undef SPEC_MASK_DECLARE

template <int THREADS>
__global__ void __launch_bounds__(THREADS)
    plan_kernel(const __grid_constant__ PlanShape shape, const __grid_constant__ PlanArrays out,
                const int32_t* seq_lens, const int32_t* query_start_loc, int32_t num_requests) {
  extern __shared__ __align__(16) int32_t scratch[];
  __shared__ typename BlockTeam<THREADS>::Exchange exchange;
  BlockTeam<THREADS> team{&exchange};
  make_plan(team, shape, seq_lens, query_start_loc, num_requests, out, scratch);
}

// Field order of the shape vector exchanged with Python, SHAPE_FIELDS in spec_mask.py.
constexpr int64_t kShapeFields = sizeof(PlanShape) / sizeof(int32_t);
static_assert(kShapeFields == 20, "SHAPE_FIELDS in spec_mask.py must follow PlanShape");

PlanShape read_shape(const Array<int64_t>& fields) {
  TVM_FFI_ICHECK_EQ(static_cast<int64_t>(fields.size()), kShapeFields);
  PlanShape shape;
  int32_t* raw = reinterpret_cast<int32_t*>(&shape);
  int64_t i = 0;
  for (const int64_t v : fields) raw[i++] = static_cast<int32_t>(v);
  return shape;
}

// [grid, int32 elements of the plan buffer, partial rows] of a shape whose grid is not yet set.
Array<int64_t> sizes(Array<int64_t> fields) {
  PlanShape shape = read_shape(fields);
  shape.grid = plan_grid(shape);
  return Array<int64_t>{shape.grid, plan_layout(shape).total, max_partial_rows(shape)};
}

// [tile_kv, smem bytes, CTAs per SM, registers, spill bytes, SMs] of one compiled kernel on the
// current device.
Array<int64_t> info(int64_t mode, int64_t tile_q) {
  KernelInfo k{};
  cudaError_t status = cudaErrorInvalidValue;
#define SPEC_MASK_CASE(MODE, TILE_Q)                                          \
  if (mode == static_cast<int64_t>(MaskMode::MODE) && tile_q == TILE_Q) {     \
    status = attention_info<MaskMode::MODE, TILE_Q>(&k);                      \
  }
  SPEC_MASK_UNITS(SPEC_MASK_CASE)
#undef SPEC_MASK_CASE
  TVM_FFI_ICHECK(status == cudaSuccess)
      << "no kernel for mask mode " << mode << " and query tile " << tile_q << ": "
      << cudaGetErrorString(status);
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return Array<int64_t>{k.tile_kv, k.smem_bytes, k.ctas_per_sm, k.registers, k.local_bytes, sms};
}

void plan(TensorView buffer, TensorView seq_lens, TensorView query_start_loc,
          Array<int64_t> fields) {
  const PlanShape shape = read_shape(fields);
  const int32_t num_requests = static_cast<int32_t>(seq_lens.size(0));
  TVM_FFI_ICHECK_LE(num_requests, shape.max_requests);
  TVM_FFI_ICHECK_GE(buffer.size(0), plan_layout(shape).total);
  ffi::CUDADeviceGuard guard(buffer.device().device_id);
  const cudaStream_t stream = get_stream(buffer.device());
  const size_t smem = sizeof(int32_t) * plan_scratch_elements(shape);
  auto* seq = static_cast<const int32_t*>(seq_lens.data_ptr());
  auto* start = static_cast<const int32_t*>(query_start_loc.data_ptr());
  const PlanArrays out = plan_arrays(shape, static_cast<int32_t*>(buffer.data_ptr()));
  const PlanLaunch launch = plan_launch(shape.max_requests);
  const auto kernel = launch.threads == 128 ? plan_kernel<128> : plan_kernel<512>;
  kernel<<<launch.blocks, launch.threads, smem, stream>>>(shape, out, seq, start, num_requests);
  const cudaError_t status = cudaGetLastError();
  TVM_FFI_ICHECK(status == cudaSuccess) << "plan: " << cudaGetErrorString(status);
}

// The merge may start while the attention kernel drains, where the hardware can do that: it saves
// a launch latency per layer. The attention kernel itself is launched in plain stream order.
cudaError_t launch_merge(const Params& p, const PlanArrays& plan, const MergeLaunch& merge, float* lse,
                         int32_t num_rows, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(merge.blocks));
  config.blockDim = dim3(static_cast<uint32_t>(32 * merge.block_warps));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, merge_kernel<kHeadDim, DTypeQ>(merge),
                            static_cast<const DTypeQ*>(p.partial_o), static_cast<const float*>(p.lse),
                            static_cast<const PlanHeader*>(plan.header),
                            static_cast<const MergeRow*>(plan.merge_rows), p.o, lse,
                            num_rows, static_cast<int32_t>(p.num_qo_heads));
}

// hnd: the KV cache's layout within a page is [heads, tokens] instead of [tokens, heads].
void run(int64_t mode, Array<int64_t> fields, TensorView buffer, TensorView partial_o,
         TensorView partial_lse, TensorView q, TensorView k_cache, TensorView v_cache, bool hnd,
         TensorView page_table, Optional<TensorView> mask, TensorView o, Optional<TensorView> lse,
         double sm_scale, double k_scale, double v_scale, Optional<TensorView> k_scale_tensor,
         Optional<TensorView> v_scale_tensor, double soft_cap) {
  const PlanShape shape = read_shape(fields);
  TVM_FFI_ICHECK_EQ(q.size(2), kHeadDim);
  const int32_t num_qo_heads = static_cast<int32_t>(q.size(1));
  TVM_FFI_ICHECK_EQ(num_qo_heads, shape.num_kv_heads * shape.group_size);
  const int32_t num_rows = static_cast<int32_t>(q.size(0));
  TVM_FFI_ICHECK_LE(num_rows, shape.max_rows);
  const int64_t page_size = hnd ? k_cache.size(2) : k_cache.size(1);

  ffi::CUDADeviceGuard guard(q.device().device_id);
  const cudaStream_t stream = get_stream(q.device());
  const PlanArrays plan = plan_arrays(shape, static_cast<int32_t*>(buffer.data_ptr()));

  Params p{};
  p.q = static_cast<DTypeQ*>(q.data_ptr());
  p.k_cache = static_cast<const DTypeKV*>(k_cache.data_ptr());
  p.v_cache = static_cast<const DTypeKV*>(v_cache.data_ptr());
  p.page_table = static_cast<const int32_t*>(page_table.data_ptr());
  TVM_FFI_ICHECK(use_cache(p, k_cache.size(0), page_size, k_cache.stride(0), k_cache.stride(hnd ? 2 : 1),
                           k_cache.stride(hnd ? 1 : 2)))
      << "KV cache: its strides divide by so small a power of two that 32 bits cannot number its tokens' places";
  use_plan(p, shape, plan);
  p.q_stride_row = static_cast<int32_t>(q.stride(0));
  p.q_stride_head = static_cast<int32_t>(q.stride(1));
  p.mask_words = mask ? static_cast<const uint64_t*>(mask.value().data_ptr()) : nullptr;
  p.k_scale_ptr =
      k_scale_tensor ? static_cast<const float*>(k_scale_tensor.value().data_ptr()) : nullptr;
  p.v_scale_ptr =
      v_scale_tensor ? static_cast<const float*>(v_scale_tensor.value().data_ptr()) : nullptr;
  p.sm_scale = static_cast<float>(sm_scale);
  p.k_scale = static_cast<float>(k_scale);
  p.v_scale = static_cast<float>(v_scale);
  p.logits_soft_cap = static_cast<float>(soft_cap);

  auto* out = static_cast<DTypeQ*>(o.data_ptr());
  float* out_lse = lse ? static_cast<float*>(lse.value().data_ptr()) : nullptr;
  p.partial_o = static_cast<DTypeQ*>(partial_o.data_ptr());
  p.o = out;
  p.lse = p.partition_kv ? static_cast<float*>(partial_lse.data_ptr()) : out_lse;

  cudaError_t status = cudaErrorInvalidValue;
#define SPEC_MASK_CASE(MODE, TILE_Q)                                                      \
  if (mode == static_cast<int64_t>(MaskMode::MODE) && shape.tile_q == TILE_Q) {           \
    status = launch_attention<MaskMode::MODE, TILE_Q>(p, shape.grid, shape.num_kv_heads,  \
                                                      stream);                            \
  }
  SPEC_MASK_UNITS(SPEC_MASK_CASE)
#undef SPEC_MASK_CASE
  TVM_FFI_ICHECK(status == cudaSuccess)
      << "attention, mask mode " << mode << ", query tile " << shape.tile_q << ": "
      << cudaGetErrorString(status);
  if (p.partition_kv && num_rows > 0) {
    const int64_t pairs = static_cast<int64_t>(num_rows) * num_qo_heads;
    TVM_FFI_ICHECK_LE(pairs, INT32_MAX);
    status = launch_merge(p, plan, merge_launch(shape, pairs, kHeadDim), out_lse, num_rows, stream);
    TVM_FFI_ICHECK(status == cudaSuccess) << "merge: " << cudaGetErrorString(status);
  }
}

}  // namespace spec_mask

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sizes, spec_mask::sizes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(info, spec_mask::info);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan, spec_mask::plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, spec_mask::run);
