// Row maps of all-to-all messages whose split sizes were fixed before the tokens were routed.
#include "args/split_slots.cuh"
#include "prelude.cuh"

constexpr int THREADS = 256;

// The last of the parts starts[0], starts[stride], … that begins at or before `at`: empty parts before it begin there too.
__device__ __forceinline__ u32 part_of(const i32* starts, u32 stride, u32 parts, i32 at) {
    u32 low = 0, high = parts;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (starts[i64(middle) * stride] <= at) low = middle;
        else high = middle;
    }
    return low;
}

// One thread has rank j. Several may write the same 1.
__device__ __forceinline__ void note(const SplitSlotArgs& a, const i32* slots, u32 j, i32 count) {
    i32* peaks = reinterpret_cast<i32*>(a.peaks);
    peaks[j] = max(peaks[j], count);
    if (count > slots[j + 1] - slots[j]) *reinterpret_cast<i32*>(a.overflow) = 1;
}

extern "C" __global__ void __launch_bounds__(THREADS) pack_slots(const SplitSlotArgs a) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i32* offsets = reinterpret_cast<const i32*>(a.offsets);
    const i32* slots = reinterpret_cast<const i32*>(a.slots);
    auto first = [&](u32 j) { return offsets[i64(j) * a.own]; };
    if (i < a.ranks) note(a, slots, u32(i), first(u32(i) + 1) - first(u32(i)));
    if (i < a.message) {
        const u32 j = part_of(slots, 1, a.ranks, i32(i));
        const i32 within = i32(i) - slots[j];
        const bool used = i < slots[a.ranks] && within < first(j + 1) - first(j);
        reinterpret_cast<i32*>(a.out)[i] = used ? reinterpret_cast<const i32*>(a.source)[first(j) + within] : -1;
    }
    if (i < a.selections) {
        const i32 row = reinterpret_cast<const i32*>(a.rows)[i];
        const u32 j = part_of(offsets, a.own, a.ranks, row);
        const i32 within = row - first(j);
        const bool fits = row >= 0 && within < slots[j + 1] - slots[j];
        reinterpret_cast<i32*>(a.message_rows)[i] = fits ? slots[j] + within : -1;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) unpack_slots(const SplitSlotArgs a) {
    const i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i32* counts = reinterpret_cast<const i32*>(a.offsets);
    const i32* slots = reinterpret_cast<const i32*>(a.slots);
    if (i < a.ranks) {
        i32 count = 0;
        for (u32 e = 0; e < a.own; e++) count += counts[i * a.own + e];
        note(a, slots, u32(i), count);
    }
    if (i >= a.message) return;
    const u32 j = part_of(slots, 1, a.ranks, i32(i));
    i32 within = i32(i) - slots[j], expert = -1;
    if (i < slots[a.ranks]) {
        for (u32 e = 0; e < a.own; e++) {
            const i32 count = counts[i64(j) * a.own + e];
            if (within < count) {
                expert = i32(e);
                break;
            }
            within -= count;
        }
    }
    reinterpret_cast<i32*>(a.out)[i] = expert;
}

// One thread.
extern "C" __global__ void overflow_to_infinity(const SplitSlotArgs a) {
    if (*reinterpret_cast<const i32*>(a.overflow) != 0)
        *reinterpret_cast<double*>(a.out) = __longlong_as_double(0x7ff0000000000000ll);
}
