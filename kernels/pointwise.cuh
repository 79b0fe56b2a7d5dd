// bf16 numbers in pairs, and the sigmoid. Everything rounds to nearest and nothing is contracted, so that no compiler changes a bit.
#pragma once

using u32 = unsigned;

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float sigmoid(float x) {
    const float e = expf(-fabsf(x));
    return __fdiv_rn(x < 0.f ? e : 1.f, __fadd_rn(e, 1.f));
}

// Within 4 ulp, which bf16 results hide; 0 below -88, where the sigmoid is no normal number of fp32.
__device__ __forceinline__ float fast_sigmoid(float x) {
    float e, gate;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.44269504f)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(gate) : "f"(__fadd_rn(e, 1.f)));
    return gate;
}

// Of silu, given the sigmoid.
__device__ __forceinline__ float silu_slope(float x, float gate) { return __fmul_rn(gate, __fmaf_rn(x, __fsub_rn(1.f, gate), 1.f)); }
