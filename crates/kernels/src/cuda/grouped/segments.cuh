// Segments of N rows: segment e is counts[e] rows from offsets[e]. What the device was told may be nonsense, which must not
// lead outside the rows.
struct Segments {
    u64 offsets;  // i32 [E + 1]
    u64 counts;   // i32 [E]
    i32 count;    // E
    i32 rows;     // N
    __device__ __forceinline__ i32 first(i32 e) const {
        return min(max(reinterpret_cast<const i32*>(offsets)[e], 0), rows);
    }
    __device__ __forceinline__ i32 length(i32 e) const {
        return min(max(reinterpret_cast<const i32*>(counts)[e], 0), rows - first(e));
    }
    // Rows before segment e that are nobody's; those behind the last segment for e = E.
    __device__ __forceinline__ i32 gap_first(i32 e) const { return e == 0 ? 0 : first(e - 1) + length(e - 1); }
    __device__ __forceinline__ i32 gap_end(i32 e) const { return e == count ? rows : first(e); }
};

// Zeroes `width` numbers of each row that is nobody's: warp `self` of `warps`. In 16-byte stores where `wide` says that rows
// are aligned and `width` is whole.
template <class T>
__device__ __forceinline__ void blank_gaps(const Segments& z, T* y, i64 step, i32 width, bool wide, i32 self, i32 warps) {
    const i32 lane = threadIdx.x & 31;
    for (i32 e = 0; e <= z.count; e++) {
        const i32 from = z.gap_first(e), end = z.gap_end(e);
        for (i32 r = from + self; r < end; r += warps) {
            T* row = y + r * step;
            if (wide) {
                for (i32 c = lane * Wide<T>::count; c < width; c += 32 * Wide<T>::count)
                    *reinterpret_cast<uint4*>(row + c) = make_uint4(0, 0, 0, 0);
            } else {
                for (i32 c = lane; c < width; c += 32) row[c] = from_f32<T>(0.0f);
            }
        }
    }
}
