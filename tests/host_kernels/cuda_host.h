// CUDA's language on a CPU: threads of a block are fibres that take turns, so that kernel sources run as they are.
// One block at a time. A fibre gives way where a thread may wait; a round in which nobody moves is a deadlock, and is reported.
#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
template <typename T> T max(T a, T b) { return a > b ? a : b; }

struct __nv_bfloat16 { uint16_t bits; };
struct __half2 { uint16_t x, y; };
inline uint32_t bits_of(float x) { uint32_t r; memcpy(&r, &x, 4); return r; }
inline float float_of(uint32_t x) { float r; memcpy(&r, &x, 4); return r; }
inline uint32_t __float_as_uint(float x) { return bits_of(x); }
inline float __uint_as_float(uint32_t x) { return float_of(x); }
inline uint16_t to_half(float x) { _Float16 h = static_cast<_Float16>(x); uint16_t r; memcpy(&r, &h, 2); return r; }
inline float of_half(uint16_t x) { _Float16 h; memcpy(&h, &x, 2); return static_cast<float>(h); }
inline __half2 __floats2half2_rn(float x, float y) { return {to_half(x), to_half(y)}; }
inline float2 __half22float2(__half2 h) { return {of_half(h.x), of_half(h.y)}; }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }

namespace host {

struct Fibre { ucontext_t context; std::vector<char> stack; bool done = false; unsigned thread = 0; };
struct Meeting {  // of threads that all come before any goes on
    unsigned arrived = 0, turn = 0;
    uint64_t in[512], out[2][512];
};

struct Block {
    std::vector<Fibre> fibres;
    ucontext_t scheduler;
    Fibre* self = nullptr;
    unsigned threads = 0, seed = 0;
    long long moves = 0;
    dim3 index, grid;
    std::vector<Meeting> meetings;                            // block, 16 named ones, warpgroups, warps
    struct Copy { unsigned owner; std::function<void()> work; };
    std::deque<Copy> copies;                                  // under way, in no order
    std::vector<unsigned> under_way;                          // stores of each thread
    int registers[4] = {}, free_registers = 0;

    unsigned random() { return seed = seed * 1664525u + 1013904223u, seed >> 8; }
    void yield() { swapcontext(&self->context, &scheduler); }
    template <typename Ready> void wait(Ready ready) {
        while (!ready()) yield();
        moves++;
    }
    // Everybody's value, once `count` threads are there; `last` is run by the one who comes last.
    const uint64_t* meet(Meeting& m, unsigned place, unsigned count, uint64_t value, const std::function<void()>& last = nullptr) {
        const unsigned turn = m.turn;
        m.in[place] = value;
        if (++m.arrived == count) {
            if (last) last();
            memcpy(m.out[turn & 1], m.in, sizeof m.in);
            m.arrived = 0, m.turn++;
        }
        wait([&] { return m.turn != turn; });
        return m.out[turn & 1];
    }
    void copy_some(bool all) {
        while (!copies.empty()) {
            if (!all && random() % 4) return;
            const size_t i = random() % copies.size();
            Copy copy = copies[i];
            copies.erase(copies.begin() + static_cast<long>(i));
            copy.work();
            under_way[copy.owner]--;
            moves++;
        }
    }
};
extern Block block;
inline unsigned thread() { return block.self->thread; }
inline unsigned lane() { return thread() % 32; }
inline Meeting& of_block() { return block.meetings[0]; }
inline Meeting& named(int id) { return block.meetings[1 + id]; }
inline Meeting& of_warpgroup() { return block.meetings[17 + thread() / 128]; }
inline Meeting& of_warp() { return block.meetings[21 + thread() / 32]; }
inline const uint64_t* warp_values(uint64_t x, const std::function<void()>& last = nullptr) { return block.meet(of_warp(), lane(), 32, x, last); }

template <typename T> T pick(const uint64_t* from, unsigned i) { T r; memcpy(&r, from + i, sizeof r); return r; }
template <typename T> uint64_t raw_of(T x) { uint64_t r = 0; memcpy(&r, &x, sizeof x); return r; }

}  // namespace host

#define threadIdx (dim3{host::thread(), 0, 0})
#define blockIdx (host::block.index)
#define gridDim (host::block.grid)

template <typename T> T __shfl_sync(unsigned, T x, int from) { return host::pick<T>(host::warp_values(host::raw_of(x)), from & 31); }
template <typename T> T __shfl_xor_sync(unsigned, T x, int mask) { return host::pick<T>(host::warp_values(host::raw_of(x)), host::lane() ^ mask); }
template <typename T> T __shfl_up_sync(unsigned, T x, int d) {
    const uint64_t* all = host::warp_values(host::raw_of(x));
    return static_cast<int>(host::lane()) < d ? x : host::pick<T>(all, host::lane() - d);
}
template <typename T> T __shfl_down_sync(unsigned, T x, int d) {
    const uint64_t* all = host::warp_values(host::raw_of(x));
    return host::lane() + d > 31 ? x : host::pick<T>(all, host::lane() + d);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const uint64_t* all = host::warp_values(x);
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= static_cast<unsigned>(all[i]) << i;
    return r;
}
inline void __syncwarp() { host::warp_values(0); }
inline void __syncthreads() { host::block.meet(host::of_block(), host::thread(), host::block.threads, 0); }
inline bool __syncthreads_or(bool x) {
    const uint64_t* all = host::block.meet(host::of_block(), host::thread(), host::block.threads, x);
    bool r = false;
    for (unsigned i = 0; i < host::block.threads; i++) r |= all[i] != 0;
    return r;
}
