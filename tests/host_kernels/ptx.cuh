// The interface of kernels/ptx.cuh on a CPU. Copies take their time: they are done in any order, some steps later.
#pragma once
#include "cuda_host.h"

using u32 = uint32_t;
using u64 = unsigned long long;

struct alignas(64) TensorMap { u64 words[16]; };  // here: address; tokens, heads, channels; bytes from token to token, from head to head

extern char raw[];  // the block's shared memory
inline u32 smem_addr(const void* p) { return static_cast<u32>(static_cast<const char*>(p) - raw); }

// ---- mbarriers ------------------------------------------------------------------------------------------------------
struct HostBarrier { int16_t count, pending; int32_t state; };  // bytes that are missing, times two, and the phase
inline HostBarrier& host_barrier(u64* bar) { return *reinterpret_cast<HostBarrier*>(bar); }
inline void host_settle(HostBarrier& b) {
    if (b.pending < 0) throw std::runtime_error("a barrier got more arrivals than it waits for");
    if (b.pending == 0 && b.state >> 1 == 0) b.state ^= 1, b.pending = b.count;
}
inline void barrier_init(u64* bar, u32 arrivals) { host_barrier(bar) = {static_cast<int16_t>(arrivals), static_cast<int16_t>(arrivals), 0}; }
inline void barrier_arrive(u64* bar) { host_barrier(bar).pending--, host_settle(host_barrier(bar)), host::block.moves++; }
inline void barrier_expect(u64* bar, u32 bytes) { host_barrier(bar).state += 2 * static_cast<int>(bytes), barrier_arrive(bar); }
inline void host_bytes(u64* bar, u32 bytes) { host_barrier(bar).state -= 2 * static_cast<int>(bytes), host_settle(host_barrier(bar)); }
inline void barrier_wait(u64* bar, u32 parity) { host::block.wait([=] { return static_cast<u32>(host_barrier(bar).state & 1) != parity; }); }
inline void fence_barrier_init() {}
inline void fence_async() {}
template <int ID, int THREADS> void named_barrier() { host::block.meet(host::named(ID), host::thread(), THREADS, 0); }
inline void pair_barrier(int id) { host::block.meet(host::named(id), host::thread(), 64, 0); }

// ---- registers of a warpgroup: what a launch has is shared by its warpgroups ------------------------------------------
inline void host_registers(int n) {
    const unsigned group = host::thread() / 128;
    host::block.meet(host::of_warpgroup(), host::thread() % 128, 128, 0);
    if (host::thread() % 128 == 0) {
        host::block.wait([=] { return host::block.free_registers >= n - host::block.registers[group]; });
        host::block.free_registers -= n - host::block.registers[group], host::block.registers[group] = n;
    }
    host::block.meet(host::of_warpgroup(), host::thread() % 128, 128, 0);
}
template <int N> void registers_inc() { host_registers(N); }
template <int N> void registers_dec() { host_registers(N); }

// ---- copies ---------------------------------------------------------------------------------------------------------
inline u32 swizzled(u32 row, u32 byte) { return (row * 128 + byte) ^ ((row % 8) * 16); }
inline void host_copy(std::function<void()> work) {
    host::block.under_way[host::thread()]++;
    host::block.copies.push_back({host::thread(), std::move(work)});
}
inline char* host_row(const TensorMap* map, int x, int y, int z, int row) {  // null beyond the tensor
    if (static_cast<u64>(z + row) >= map->words[1] || static_cast<u64>(y) >= map->words[2]) return nullptr;
    return reinterpret_cast<char*>(map->words[0]) + (z + row) * static_cast<long long>(map->words[4]) + y * static_cast<long long>(map->words[5]) + x * 2;
}
inline void tma_load(void* dst, const TensorMap* map, u64* bar, int x, int y, int z) {
    host_copy([=] {
        for (int r = 0; r < 64; r++)
            for (int u = 0; u < 8; u++) {
                char* to = static_cast<char*>(dst) + swizzled(r, u * 16);
                if (const char* from = host_row(map, x, y, z, r)) memcpy(to, from + u * 16, 16); else memset(to, 0, 16);
            }
        host_bytes(bar, 64 * 128);
    });
}
inline void tma_store(const TensorMap* map, const void* src, int x, int y, int z) {
    host_copy([=] {
        for (int r = 0; r < 64; r++)
            for (int u = 0; u < 8; u++)
                if (char* to = host_row(map, x, y, z, r)) memcpy(to + u * 16, static_cast<const char*>(src) + swizzled(r, u * 16), 16);
    });
}
template <typename Move> void host_strip(const TensorMap* map, const void* tile, int row, Move move) {
    for (int r = 0; r < 16; r++)
        for (int u = 0; u < 8; u++) {
            const bool there = row + r < static_cast<int>(map->words[1]) && u * 8 < static_cast<int>(map->words[3]);
            char* at = reinterpret_cast<char*>(map->words[0]) + (row + r) * static_cast<long long>(map->words[4]) + u * 16;
            move(static_cast<char*>(const_cast<void*>(tile)) + swizzled(r, u * 16), there ? at : nullptr);
        }
}
inline void strip_load(void* dst, const TensorMap* map, u64* bar, int row) {
    host_copy([=] {
        host_strip(map, dst, row, [](char* to, const char* from) { if (from) memcpy(to, from, 16); else memset(to, 0, 16); });
        host_bytes(bar, 16 * 128);
    });
}
inline void strip_store(const TensorMap* map, const void* src, int row) {
    host_copy([=] { host_strip(map, src, row, [](const char* from, char* to) { if (to) memcpy(to, from, 16); }); });
}
inline void bulk_load(void* dst, const void* src, u32 bytes, u64* bar) { host_copy([=] { memcpy(dst, src, bytes), host_bytes(bar, bytes); }); }
inline void bulk_store(void* dst, const void* src, u32 bytes) { host_copy([=] { memcpy(dst, src, bytes); }); }
template <int N> void bulk_wait_read() { const unsigned t = host::thread(); host::block.wait([=] { return host::block.under_way[t] <= N; }); }
template <int N> void bulk_wait() { bulk_wait_read<N>(); }
inline void copy_async16(u32 dst, const void* src, bool read) { if (read) memcpy(raw + dst, src, 16); else memset(raw + dst, 0, 16); }
inline void copy_async4(void* dst, const void* src, bool read) { if (read) memcpy(dst, src, 4); else memset(dst, 0, 4); }
inline void copy_async_wait() {}

// ---- numbers --------------------------------------------------------------------------------------------------------
inline u32 to_bf16(float x) { const u32 b = bits_of(x); return std::isnan(x) ? 0x7fff : (b + 0x7fff + (b >> 16 & 1)) >> 16; }
inline float of_bf16(u32 x) { return float_of(x << 16); }
inline u32 pack(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
inline float low_half(u32 x) { return float_of(x << 16); }
inline float high_half(u32 x) { return float_of(x & 0xffff0000u); }
inline float exp2_approx(float x) { return std::exp2(x); }
inline u32 round_tf32(float x) { return (bits_of(x) + 0x1000) & 0xffffe000u; }
inline u32 load_shared(u32 address) { u32 r; memcpy(&r, raw + address, 4); return r; }
inline void store_shared(u32 address, u32 x) { memcpy(raw + address, &x, 4); }

// ---- matrices of 8 x 8, spread over a warp ----------------------------------------------------------------------------
inline uint16_t host_at(u64 address, unsigned column) { uint16_t r; memcpy(&r, raw + address + column * 2, 2); return r; }
inline void host_matrices(u32 a, u32* r, bool trans) {
    const u64* rows = reinterpret_cast<const u64*>(host::warp_values(a));
    const unsigned l = host::lane(), p = l % 4 * 2;
    for (int j = 0; j < 4; j++)
        r[j] = trans ? host_at(rows[j * 8 + p], l / 4) | host_at(rows[j * 8 + p + 1], l / 4) << 16
                     : host_at(rows[j * 8 + l / 4], p) | host_at(rows[j * 8 + l / 4], p + 1) << 16;
    host::warp_values(0);
}
inline void host_store_matrices(u32 a, const u32 (&r)[4], bool trans) {
    const u64* rows = reinterpret_cast<const u64*>(host::warp_values(a));
    const unsigned l = host::lane(), p = l % 4 * 2;
    for (int j = 0; j < 4; j++)
        for (unsigned i = 0; i < 2; i++) {
            const uint16_t x = static_cast<uint16_t>(r[j] >> i * 16);
            memcpy(raw + (trans ? rows[j * 8 + p + i] + l / 4 * 2 : rows[j * 8 + l / 4] + (p + i) * 2), &x, 2);
        }
    host::warp_values(0);
}
inline void ldmatrix(u32 a, u32 (&r)[4]) { host_matrices(a, r, false); }
inline void ldmatrix_trans(u32 a, u32* r) { host_matrices(a, r, true); }
inline void stmatrix(u32 a, u32 r0, u32 r1, u32 r2, u32 r3) { host_store_matrices(a, {r0, r1, r2, r3}, false); }
inline void stmatrix_trans(u32 a, u32 r0, u32 r1, u32 r2, u32 r3) { host_store_matrices(a, {r0, r1, r2, r3}, true); }
inline u32 transpose8x8(u32 x) {
    const uint64_t* all = host::warp_values(x);
    const unsigned l = host::lane(), row = l / 4, p = l % 4 * 2;
    auto at = [&](unsigned r, unsigned c) { return static_cast<u32>(all[r * 4 + c / 2] >> c % 2 * 16) & 0xffff; };
    return at(p, row) | at(p + 1, row) << 16;
}

// ---- products of a warp: d [16 x 8] += a [16 x k] b [k x 8] -----------------------------------------------------------
struct HostMma { float* d; const u32* a; u32 b[2]; };
template <typename Value> void host_mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int depth, Value value) {
    HostMma own{d, a, {b0, b1}};
    host::Meeting& m = host::of_warp();
    host::warp_values(reinterpret_cast<uint64_t>(&own), [&] {
        auto of = [&](int l) { return reinterpret_cast<HostMma*>(m.in[l]); };
        const int per = depth == 8 ? 1 : 2, half = depth / 2;  // numbers in a register; k from register to register
        for (int r = 0; r < 16; r++)
            for (int c = 0; c < 8; c++) {
                float sum = of(r % 8 * 4 + c / 2)->d[r / 8 * 2 + c % 2];
                for (int k = 0; k < depth; k++) {
                    const int l = k % half / per, i = k / half;
                    sum += value(of(r % 8 * 4 + l)->a[i * 2 + r / 8], k % per) * value(of(c * 4 + l)->b[i], k % per);
                }
                of(r % 8 * 4 + c / 2)->d[r / 8 * 2 + c % 2] = sum;
            }
    });
}
inline void mma_fp16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host_mma(d, a, b0, b1, 16, [](u32 x, int i) { return of_half(static_cast<uint16_t>(x >> i * 16)); });
}
inline void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host_mma(d, a, b0, b1, 8, [](u32 x, int) { return float_of(x & 0xffffe000u); });
}

// ---- products of a warpgroup: d [64 x n] (+)= a [64 x 16] b [16 x n] --------------------------------------------------
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int N> void wgmma_wait() {}
inline u64 descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | (static_cast<u64>(leading) << 16) | (static_cast<u64>(stride) << 32) | (1ull << 62);
}
// Number (i, k) of an operand in shared memory, i a row of a or a column of b.
inline float host_operand(u64 d, bool mn, u32 i, u32 k) {
    const u32 start = static_cast<u32>(d & 0x3fff) << 4, leading = static_cast<u32>(d >> 16 & 0x3fff) << 4, stride = static_cast<u32>(d >> 32 & 0x3fff) << 4;
    const u32 at = mn ? start + i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2 : start + i / 8 * stride + i % 8 * 128 + k * 2;
    return of_bf16(host_at(at ^ ((at >> 7 & 7) << 4), 0));
}
struct HostWgmma { float* d; const u32* a; };
inline void host_wgmma(int n, float* d, const u32* a, u64 ad, bool a_mn, u64 b, bool b_mn, bool add) {
    HostWgmma own{d, a};
    host::Meeting& m = host::of_warpgroup();
    host::block.meet(m, host::thread() % 128, 128, reinterpret_cast<uint64_t>(&own), [&] {
        auto of = [&](int t) { return reinterpret_cast<HostWgmma*>(m.in[t]); };
        float left[64][16], right[16][128];
        for (int r = 0; r < 64; r++)
            for (int k = 0; k < 16; k++)
                left[r][k] = a ? of_bf16(of(r / 16 * 32 + r % 8 * 4 + k % 8 / 2)->a[k / 8 * 2 + r / 8 % 2] >> k % 2 * 16 & 0xffff) : host_operand(ad, a_mn, r, k);
        for (int k = 0; k < 16; k++)
            for (int c = 0; c < n; c++) right[k][c] = host_operand(b, b_mn, c, k);
        for (int r = 0; r < 64; r++)
            for (int c = 0; c < n; c++) {
                float& to = of(r / 16 * 32 + r % 8 * 4 + c % 8 / 2)->d[c / 8 * 4 + r / 8 % 2 * 2 + c % 2];
                float sum = add ? to : 0.f;
                for (int k = 0; k < 16; k++) sum += left[r][k] * right[k][c];
                to = sum;
            }
    });
}
inline void wgmma_rs64(float (&d)[32], const u32* a, u64 b, int add) { host_wgmma(64, d, a, 0, false, b, false, add); }
inline void wgmma_ss64(float (&d)[32], u64 a, u64 b, int add) { host_wgmma(64, d, nullptr, a, false, b, false, add); }
inline void wgmma_ss64_new(float (&d)[32], u64 a, u64 b) { host_wgmma(64, d, nullptr, a, false, b, false, false); }
inline void wgmma_rs128_mn(float (&d)[64], const u32* a, u64 b) { host_wgmma(128, d, a, 0, false, b, true, true); }
inline void wgmma_rs64_mn(float (&d)[32], const u32* a, u64 b, int add) { host_wgmma(64, d, a, 0, false, b, true, add); }
template <int A_MN> void wgmma_ss64_mn(float (&d)[32], u64 a, u64 b) { host_wgmma(64, d, nullptr, a, A_MN, b, true, true); }
