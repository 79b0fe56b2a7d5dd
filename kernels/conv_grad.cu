// conv_grad: dx, and per strip the sums that make dweight and dbias.
//
// dpre = dy act'(pre), pre made again from x; dx[t] = sum_j weight[W - 1 - j] dpre[t + j], added in fp32 in the order of j, each a multiply
// and then an add. Grid and block as `conv`; with `listed` the kernel only writes dpre of listed rows, for the ranks that need them.
// Going down, a thread keeps W - 1 unfinished sums: that of row u - j has its taps 0 .. j. A run is finished by the rows that its last row
// names: of another strip or fragment (dpre is made again), of the halo, or zero. Reads x and dy once (and 2 (W - 1) rows more per strip),
// writes dx once and W + 1 rows of fp32 per strip.
#include "conv.cuh"

struct GradParams {
    ConvInput in;
    const Number* dy;             // [T, C], rows `dy_stride` numbers apart
    const long long* adj_taps;    // [T, W], rows of concat(dpre [T], adj_halo [R'], zero row)
    const float* adj_halo;        // [R', C]
    const long long* listed;      // [S], or null
    float* sent;                  // [S, C], dpre of listed rows
    Number* dx;                   // [T, C], rows `dx_stride` numbers apart
    float* sums;                  // [strips, W + 1, C]: by column of the weight, then of the bias
    long long dy_stride, dx_stride;
    int adj_halo_rows;
};

// dy of a row becomes dpre.
template <bool SILU>
__device__ __forceinline__ void through_activation(Row& d, const GradParams& p, const Taps& taps, const Row (&past)[W]) {
    if (!SILU) return;
    Row pre;
    pre_activation(pre, taps, past, p.in.bias);
#pragma unroll
    for (int v = 0; v < VEC; v++) {
        const float gate = gate_of(pre[v]);
        d[v] = __fmul_rn(d[v], silu_slope(pre[v], gate));
    }
}

template <bool SILU>
__device__ __forceinline__ void row_gradient(Row& d, const GradParams& p, const Taps& taps, long long row, int c) {
    Row past[W];
#pragma unroll
    for (int j = 0; j < W; j++) fetch(past[j], p.in, p.in.taps[row * W + j], c);
    unpack(d, load(p.dy + row * p.dy_stride + c));
    through_activation<SILU>(d, p, taps, past);
}

// What a tap of the adjoint names: of a row of any strip or fragment, of the halo, or zero.
template <bool SILU>
__device__ __forceinline__ void tap_gradient(Row& d, const GradParams& p, const Taps& taps, long long row, int c) {
    d[0] = d[1] = d[2] = d[3] = 0.f;
    const long long outside = row - p.in.tokens;
    if (outside < 0) row_gradient<SILU>(d, p, taps, row, c);
    else if (outside < p.adj_halo_rows) {
        const float4 got = __ldg(reinterpret_cast<const float4*>(p.adj_halo + outside * p.in.channels + c));
        d[0] = got.x, d[1] = got.y, d[2] = got.z, d[3] = got.w;
    }
}

template <bool SILU>
__device__ __forceinline__ void listed_row(const GradParams& p, const Taps& taps, int i, int c) {
    Row d;
    row_gradient<SILU>(d, p, taps, p.listed[i], c);
    *reinterpret_cast<float4*>(p.sent + static_cast<long long>(i) * p.in.channels + c) = make_float4(d[0], d[1], d[2], d[3]);
}

// A thread on its way down a strip.
template <bool SILU>
struct Walk {
    const GradParams& p;
    const Taps& taps;
    const int first, num_rows, c;
    int run;  // first row of the run, counted in the strip
    Row past[W], open[W - 1], dweight[W], dbias;

    __device__ __forceinline__ Walk(const GradParams& p, const Taps& taps, int first, int c)
        : p(p), taps(taps), first(first), num_rows(min(STRIP, p.in.tokens - first)), c(c), run(0), dweight{}, dbias{} {}

    // Rows from r on; those that T does not have are its last one.
    __device__ __forceinline__ void fetch_batch(Batch& x, Batch& dy, int r) const {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const int row = min(first + r + i, p.in.tokens - 1);
            x[i] = load(p.in.x + row * p.in.stride + c), dy[i] = load(p.dy + row * p.dy_stride + c);
        }
    }

    // dpre of row r: dx of the row W - 1 above it is complete, and written if it is of this run.
    __device__ __forceinline__ void add(const Row& d, int r) {
        Row dx;
#pragma unroll
        for (int v = 0; v < VEC; v++) {
            dx[v] = __fadd_rn(open[W - 2][v], __fmul_rn(taps.weight[W - 1][v], d[v]));
#pragma unroll
            for (int j = W - 2; j; j--) open[j][v] = __fadd_rn(open[j - 1][v], __fmul_rn(taps.weight[j][v], d[v]));
            open[0][v] = __fmul_rn(taps.weight[0][v], d[v]);
        }
        store_if(r - (W - 1) >= run, p.dx + (first + r - (W - 1)) * p.dx_stride + c, dx);
    }

    __device__ __forceinline__ void next_gradient(Row& d, const Raw& x, const Raw& dy) {
        push(past, x);
        unpack(d, dy);
        through_activation<SILU>(d, p, taps, past);
    }

    __device__ __forceinline__ void row(const Raw& x, const Raw& dy, int r) {
        Row d;
        next_gradient(d, x, dy);
#pragma unroll
        for (int v = 0; v < VEC; v++) {
#pragma unroll
            for (int j = 0; j < W; j++) dweight[j][v] = __fmaf_rn(d[v], past[j][v], dweight[j][v]);
            dbias[v] = __fadd_rn(dbias[v], d[v]);
        }
        add(d, r);
    }

    // The run ends with the row before r.
    __device__ __forceinline__ void finish(int r) {
        const long long* next = p.adj_taps + static_cast<long long>(first + r - 1) * W;
#pragma unroll 1
        for (int k = 1; k < W; k++) {
            Row d;
            tap_gradient<SILU>(d, p, taps, next[k], c);
            add(d, r - 1 + k);
        }
    }

    // Likewise where the rows of the next strip go on with it.
    __device__ __forceinline__ void finish_below(const Batch& x, const Batch& dy) {
#pragma unroll
        for (int i = 0; i < W - 1; i++) {
            Row d;
            next_gradient(d, x[i % BATCH], dy[i % BATCH]);
            add(d, STRIP + i);
        }
    }

    // A batch in which runs start, or the strip ends.
    __device__ __forceinline__ void careful(int r, u32 here) {
        const int end = min(r + BATCH, num_rows);
#pragma unroll 1
        for (; r < end; r++, here >>= 1) {
            if (here & 1) {
                finish(r);
                run = r;
                look_back(past, p.in, first + r, c);
            }
            const long long at = first + r;
            row(load(p.in.x + at * p.in.stride + c), load(p.dy + at * p.dy_stride + c), r);
        }
    }

    __device__ __forceinline__ void strip(Starts& starts) {
        Batch x, dy;
        fetch_batch(x, dy, 0);
        look_back(past, p.in, first, c);
        const Number *next_x = p.in.x + (first + BATCH) * p.in.stride + c, *next_dy = p.dy + (first + BATCH) * p.dy_stride + c;
#pragma unroll 1
        for (int r = 0; r < num_rows; r += BATCH) {
            const u32 here = starts[0] & ((1u << BATCH) - 1);
            if (here || first + r + 2 * BATCH > p.in.tokens) {
                careful(r, here);
                fetch_batch(x, dy, r + BATCH);
                next_x += BATCH * p.in.stride, next_dy += BATCH * p.dy_stride;
            } else {
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    row(x[i], dy[i], r + i);
                    x[i] = load(next_x), dy[i] = load(next_dy);
                    next_x += p.in.stride, next_dy += p.dy_stride;
                }
            }
            advance(starts);
        }
        // What is left of starts[0] are the rows that follow, which have been fetched.
        if (W - 1 <= BATCH && !starts[0] && first + STRIP + W - 1 <= p.in.tokens) finish_below(x, dy);
        else finish(num_rows);
    }

    __device__ __forceinline__ void write_sums() const {
        float* out = p.sums + static_cast<long long>(first / STRIP) * (W + 1) * p.in.channels + c;
#pragma unroll
        for (int j = 0; j <= W; j++) {
            const Row& sum = j < W ? dweight[W - 1 - j] : dbias;
            *reinterpret_cast<float4*>(out + static_cast<long long>(j) * p.in.channels) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
    }
};

template <bool SILU>
__device__ __forceinline__ void run(const GradParams& p, Starts& starts, const Place& at) {
    const Taps taps(p.in, at.c);
    if (p.listed) return listed_row<SILU>(p, taps, at.row, at.c);
    Walk<SILU> walk(p, taps, at.row * STRIP, at.c);
    walk.strip(starts);
    walk.write_sums();
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_grad(const __grid_constant__ GradParams p) {
    const Place at(p.in);
    Starts starts;
    if (!p.listed) find_runs(starts, p.in, at.row * STRIP);
    if (at.c >= p.in.channels) return;
    if (p.in.silu) run<true>(p, starts, at);
    else run<false>(p, starts, at);
}
