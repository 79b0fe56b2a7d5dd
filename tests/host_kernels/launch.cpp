// A launch on the CPU: block after block, each with its threads as fibres in an order that `seed` decides.
// SOURCE, KERNEL and PARAMS name the kernel; the sources lie beside this file.
#include "ptx.cuh"
alignas(1024) char raw[232448];
host::Block host::block;
#include SOURCE

namespace {

PARAMS params;
std::string failure;

void run_thread() {
    try {
        KERNEL(params);
    } catch (const std::exception& error) {
        failure = error.what();
    }
    host::block.self->done = true;
    host::block.moves++;
    swapcontext(&host::block.self->context, &host::block.scheduler);
}

void start(unsigned threads) {
    host::Block& b = host::block;
    b.fibres.resize(threads);
    b.threads = threads;
    b.meetings.assign(37, {});
    b.under_way.assign(threads, 0);
    for (int& each : b.registers) each = static_cast<int>(65536 / threads / 8 * 8);
    b.free_registers = 0;
    for (unsigned t = 0; t < threads; t++) {
        host::Fibre& f = b.fibres[t];
        f.stack.resize(1 << 16);
        f.done = false, f.thread = t;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size(), f.context.uc_link = nullptr;
        makecontext(&f.context, run_thread, 0);
    }
}

void run_block() {
    host::Block& b = host::block;
    for (unsigned left = b.threads; left;) {
        const long long before = b.moves;
        const unsigned first = b.random() % (b.threads / 32) * 32;  // which warp is ahead changes
        for (unsigned i = 0; i < b.threads; i++) {
            host::Fibre& f = b.fibres[(first + i) % b.threads];
            if (f.done) continue;
            b.self = &f;
            swapcontext(&b.scheduler, &f.context);
            if (f.done) left--;
            if (!failure.empty()) return;
        }
        b.copy_some(b.moves == before);
        if (b.moves == before) failure = "deadlock: " + std::to_string(left) + " threads wait for each other";
        if (!failure.empty()) return;
    }
    b.copy_some(true);
}

}  // namespace

extern "C" const char* host_launch(const void* bytes, const unsigned* grid, unsigned threads, unsigned seed) {
    host::Block& b = host::block;
    memcpy(&params, bytes, sizeof params);
    failure.clear();
    b.grid = {grid[0], grid[1], grid[2]};
    b.seed = seed;
    for (unsigned y = 0; y < grid[1]; y++)
        for (unsigned x = 0; x < grid[0] && failure.empty(); x++) {
            b.index = {x, y, 0};
            memset(raw, 0xff, sizeof raw);  // NaN
            start(threads);
            run_block();
        }
    return failure.c_str();
}
extern "C" int host_params() { return sizeof(PARAMS); }
