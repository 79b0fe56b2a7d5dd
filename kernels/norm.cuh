// What the kernels of the gated norm share: rows of 128 numbers, 16 threads a row, 8 numbers a thread.
#pragma once
#include "pointwise.cuh"

constexpr int DIM = 128, LANES = DIM / 8, THREADS = 256, ROWS = THREADS / LANES;  // of a block, at once

using Numbers = float[8];
using Bf16 = unsigned short;

struct Tensor {  // bf16 [T, heads, 128], strides in numbers
    const Bf16* data;
    long long token, head;
    __device__ __forceinline__ const Bf16* at(int t, int h) const { return data + t * token + h * head; }
};

__device__ __forceinline__ uint4 load(const Bf16* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ void store(Bf16* p, const Numbers& x) {
    *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

__device__ __forceinline__ void unpack(Numbers& out, const uint4& raw) {
    const u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) out[2 * i] = low_bf16(pairs[i]), out[2 * i + 1] = high_bf16(pairs[i]);
}

// sum of a[i] b[i] over the row, the same bits in all 16 threads.
__device__ __forceinline__ float row_dot(const Numbers& a, const Numbers& b) {
    float sum = __fmul_rn(a[0], b[0]);
#pragma unroll
    for (int i = 1; i < 8; i++) sum = __fmaf_rn(a[i], b[i], sum);
#pragma unroll
    for (int d = LANES / 2; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    return sum;
}

__device__ __forceinline__ float reciprocal_norm(const Numbers& o, float eps) {
    return __frsqrt_rn(__fadd_rn(__fmul_rn(row_dot(o, o), 1.f / DIM), eps));
}
