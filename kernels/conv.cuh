// What the convolution's kernels share: rows of four channels a thread, taps of a row, the pre-activation in its fixed order, silu.
//
// A strip is STRIP rows of T; a warp walks down one strip with 128 channels, a block has four neighbouring warps. A run is a piece of a
// strip in which every row follows the one before it in its document: only its first row looks its history up in the taps.
#pragma once
#include "pointwise.cuh"

#ifndef WIDTH
#define WIDTH 4
#endif
#ifndef BF16
#define BF16 1
#endif
constexpr int W = WIDTH, VEC = 4, THREADS = 128, STRIP = 128, SECTIONS = STRIP / 32, BATCH = 4;
static_assert(W >= 2 && W <= 8, "widths 2 to 8");

using Row = float[VEC];
#if BF16
using Number = unsigned short;
using Raw = uint2;
#else
using Number = float;
using Raw = float4;
#endif
using Batch = Raw[BATCH];

struct ConvInput {
    const Number* x;        // [T, C], rows `stride` numbers apart
    const Number* halo;     // [R, C]
    const float* weight;    // [C, W]
    const float* bias;      // [C], or null
    const long long* taps;  // [T, W], rows of concat(x [T], halo [R], zero row)
    long long stride;
    int tokens, halo_rows, channels, silu;
};

// Of a block: its row of blocks (a strip, or a listed row), and the first channel of a thread.
struct Place {
    int row, c;
    __device__ __forceinline__ explicit Place(const ConvInput& p) {
        const int across = (p.channels + THREADS * VEC - 1) / (THREADS * VEC);
        row = blockIdx.x / across, c = (blockIdx.x % across * THREADS + threadIdx.x) * VEC;
    }
};

__device__ __forceinline__ Raw load(const Number* p) { return __ldg(reinterpret_cast<const Raw*>(p)); }

__device__ __forceinline__ void unpack(Row& out, const Raw& raw) {
#if BF16
    out[0] = low_bf16(raw.x), out[1] = high_bf16(raw.x), out[2] = low_bf16(raw.y), out[3] = high_bf16(raw.y);
#else
    out[0] = raw.x, out[1] = raw.y, out[2] = raw.z, out[3] = raw.w;
#endif
}

// NOTE: predicated here, since a branch would make the compiler copy what lives across it.
__device__ __forceinline__ void store_if(bool wanted, Number* p, const Row& row) {
#if BF16
    asm volatile(
        "{\n.reg .pred p;\n.reg .b32 lo, hi;\nsetp.ne.s32 p, %0, 0;\ncvt.rn.bf16x2.f32 lo, %3, %2;\ncvt.rn.bf16x2.f32 hi, %5, %4;\n"
        "@p st.global.v2.b32 [%1], {lo, hi};\n}" ::"r"(int(wanted)), "l"(p), "f"(row[0]), "f"(row[1]), "f"(row[2]), "f"(row[3]) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::
            "r"(int(wanted)), "l"(p), "f"(row[0]), "f"(row[1]), "f"(row[2]), "f"(row[3]) : "memory");
#endif
}

// A row that a tap names: own, of the halo, or zero.
__device__ __forceinline__ void fetch(Row& out, const ConvInput& p, long long row, int c) {
    out[0] = out[1] = out[2] = out[3] = 0.f;
    if (row < p.tokens) unpack(out, load(p.x + row * p.stride + c));
    else if (row - p.tokens < p.halo_rows) unpack(out, load(p.halo + (row - p.tokens) * p.channels + c));
}

// The parameters of a thread's channels; weight[j] is that of the token j steps back.
struct Taps {
    Row weight[W], bias;
    __device__ __forceinline__ Taps(const ConvInput& p, int c) {
#pragma unroll
        for (int v = 0; v < VEC; v++) {
#pragma unroll
            for (int j = 0; j < W; j++) weight[j][v] = p.weight[(c + v) * W + W - 1 - j];
            bias[v] = p.bias ? p.bias[c + v] : 0.f;
        }
    }
};

// past[j] is the row j steps back. NOTE: no fused multiply-add, so that the bits are those of the torch form.
__device__ __forceinline__ void pre_activation(Row& out, const Taps& taps, const Row (&past)[W], bool has_bias) {
#pragma unroll
    for (int v = 0; v < VEC; v++) {
        out[v] = __fmul_rn(past[0][v], taps.weight[0][v]);
#pragma unroll
        for (int j = 1; j < W; j++) out[v] = __fadd_rn(out[v], __fmul_rn(past[j][v], taps.weight[j][v]));
        if (has_bias) out[v] = __fadd_rn(out[v], taps.bias[v]);
    }
}

__device__ __forceinline__ float gate_of(float x) { return BF16 ? fast_sigmoid(x) : sigmoid(x); }

// Where runs start, a bit per row of the strip, and of the W - 1 rows that follow it. The strip's first row is known to start one.
using Starts = u32[SECTIONS + 1];

// Every lane of the warp must be here.
__device__ __forceinline__ void find_runs(Starts& starts, const ConvInput& p, int first) {
#pragma unroll
    for (int s = 0; s <= SECTIONS; s++) {
        const int r = 32 * s + threadIdx.x % 32;
        const long long row = first + r;
        starts[s] = __ballot_sync(~0u, r > 0 && r < STRIP + W - 1 && row < p.tokens && p.taps[row * W + 1] != row - 1);
    }
}

// The bits of the next batch come to the front.
__device__ __forceinline__ void advance(Starts& starts) {
#pragma unroll
    for (int s = 0; s <= SECTIONS; s++) starts[s] = __funnelshift_r(starts[s], s < SECTIONS ? starts[s + 1] : 0u, BATCH);
}

// The rows before `row`, at the places that they have before it is pushed.
__device__ __forceinline__ void look_back(Row (&past)[W], const ConvInput& p, int row, int c) {
#pragma unroll
    for (int j = 1; j < W; j++) fetch(past[j - 1], p, p.taps[static_cast<long long>(row) * W + j], c);
}

__device__ __forceinline__ void push(Row (&past)[W], const Raw& raw) {
#pragma unroll
    for (int j = W - 1; j; j--)
#pragma unroll
        for (int v = 0; v < VEC; v++) past[j][v] = past[j - 1][v];
    unpack(past[0], raw);
}
