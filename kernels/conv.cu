// conv: y[t] = act(sum_j weight[W - 1 - j] x[t - j] + bias), over the tokens t - j of the same document, wherever they lie.
//
// Grid: strips x blocks of 512 channels. Block: 4 warps of 128 channels, each walks down the strip; rows are on their way while the four
// before them are computed. Reads x once (and W - 1 rows more per strip), writes y once; one tap and W - 1 per run.
// Taps are added in fp32 in the order of j, each a multiply and then an add: neither the cut of a document nor T can change a bit.
#include "conv.cuh"

struct ConvParams {
    ConvInput in;
    Number* y;  // [T, C], dense
};

// A thread on its way down a strip.
template <bool SILU>
struct Walk {
    const ConvParams& p;
    const Taps& taps;
    const int first, c;
    Row past[W];

    // Rows from r on; those that T does not have are its last one.
    __device__ __forceinline__ void fetch_batch(Batch& x, int r) const {
#pragma unroll
        for (int i = 0; i < BATCH; i++) x[i] = load(p.in.x + min(first + r + i, p.in.tokens - 1) * p.in.stride + c);
    }

    __device__ __forceinline__ void row(const Raw& x, int r) {
        Row y;
        push(past, x);
        pre_activation(y, taps, past, p.in.bias);
        if (SILU)
#pragma unroll
            for (int v = 0; v < VEC; v++) y[v] = __fmul_rn(y[v], gate_of(y[v]));
        store_if(true, p.y + static_cast<long long>(first + r) * p.in.channels + c, y);
    }

    // A batch in which runs start, or the strip ends.
    __device__ __forceinline__ void careful(int r, u32 here) {
        const int end = min(r + BATCH, min(STRIP, p.in.tokens - first));
#pragma unroll 1
        for (; r < end; r++, here >>= 1) {
            if (here & 1) look_back(past, p.in, first + r, c);
            row(load(p.in.x + (first + r) * p.in.stride + c), r);
        }
    }

    __device__ __forceinline__ void strip(Starts& starts) {
        Batch x;
        fetch_batch(x, 0);
        look_back(past, p.in, first, c);
        const Number* next = p.in.x + (first + BATCH) * p.in.stride + c;
#pragma unroll 1
        for (int r = 0; r < STRIP && first + r < p.in.tokens; r += BATCH) {
            const u32 here = starts[0] & ((1u << BATCH) - 1);
            if (here || first + r + 2 * BATCH > p.in.tokens) {
                careful(r, here);
                fetch_batch(x, r + BATCH);
                next += BATCH * p.in.stride;
            } else {
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    row(x[i], r + i);
                    x[i] = load(next);
                    next += p.in.stride;
                }
            }
            advance(starts);
        }
    }
};

template <bool SILU>
__device__ __forceinline__ void run(const ConvParams& p, Starts& starts, int first, int c) {
    const Taps taps(p.in, c);
    Walk<SILU>{p, taps, first, c}.strip(starts);
}

extern "C" __global__ void __launch_bounds__(THREADS) conv(const __grid_constant__ ConvParams p) {
    const Place at(p.in);
    Starts starts;
    find_runs(starts, p.in, at.row * STRIP);
    if (at.c >= p.in.channels) return;
    if (p.in.silu) run<true>(p, starts, at.row * STRIP, at.c);
    else run<false>(p, starts, at.row * STRIP, at.c);
}
