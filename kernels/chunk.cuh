// A chunk's sizes and the numbers that the walks and `grad` must agree on.
#pragma once
#include <cuda_bf16.h>
#include "ptx.cuh"

constexpr int C = 64, K = 128;  // tokens of a chunk, channels of a head
constexpr int TILE = C * K * 2, HALF = TILE / 2, SQUARE = C * C * 2, IMAGE = K * K * 2;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float GATE_FLOOR = -104.f;  // exp of it is 0 in fp32

// The two warpgroups that share a state or gradients by halves sync apart.
__device__ __forceinline__ void half_barrier(int half) {
    if (half == 0) named_barrier<2, 128>(); else named_barrier<3, 128>();
}
