// Vectors that are wider than a register, as two halves that are registers or such vectors themselves.
//
// GCC keeps a vector type wider than a register in memory and takes every operation on it through the stack, which makes
// kernels ten times slower and more. As members of a struct the halves stay in registers.
#pragma once

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

namespace PENSTOCK_ISA {

template <class V>
PENSTOCK_INLINE auto first_lane(const V& v) {
    return v[0];
}

template <class H>
struct Halves {
    typedef decltype(first_lane(H{})) Lane;
    static constexpr int LANES = 2 * sizeof(H) / sizeof(Lane);

    H lo, hi;

    inline __attribute__((always_inline)) Lane operator[](int i) const {
        return i < LANES / 2 ? lo[i] : hi[i - LANES / 2];
    }

    // The same bits as lanes of another type.
    template <class G>
    explicit inline __attribute__((always_inline)) operator Halves<G>() const {
        return {(G)lo, (G)hi};
    }
};

template <class H>
PENSTOCK_INLINE Halves<H> halves(H lo, H hi) {
    return {lo, hi};
}

#define PENSTOCK_LANEWISE(op)                                                                                        \
    template <class H>                                                                                               \
    PENSTOCK_INLINE auto operator op(const Halves<H>& a, const Halves<H>& b) {                                       \
        return halves(a.lo op b.lo, a.hi op b.hi);                                                                   \
    }                                                                                                                \
    template <class H>                                                                                               \
    PENSTOCK_INLINE auto operator op(const Halves<H>& a, typename Halves<H>::Lane b) {                               \
        return halves(a.lo op b, a.hi op b);                                                                         \
    }                                                                                                                \
    template <class H>                                                                                               \
    PENSTOCK_INLINE auto operator op(typename Halves<H>::Lane a, const Halves<H>& b) {                               \
        return halves(a op b.lo, a op b.hi);                                                                         \
    }
PENSTOCK_LANEWISE(+)
PENSTOCK_LANEWISE(-)
PENSTOCK_LANEWISE(*)
PENSTOCK_LANEWISE(/)
PENSTOCK_LANEWISE(&)
PENSTOCK_LANEWISE(|)
PENSTOCK_LANEWISE(^)
PENSTOCK_LANEWISE(<<)
PENSTOCK_LANEWISE(>>)
PENSTOCK_LANEWISE(<)
PENSTOCK_LANEWISE(>)
PENSTOCK_LANEWISE(>=)
PENSTOCK_LANEWISE(==)
#undef PENSTOCK_LANEWISE

template <class H>
PENSTOCK_INLINE Halves<H> operator-(const Halves<H>& v) {
    return {-v.lo, -v.hi};
}

template <class H>
PENSTOCK_INLINE Halves<H>& operator+=(Halves<H>& a, const Halves<H>& b) {
    a.lo += b.lo;
    a.hi += b.hi;
    return a;
}

}  // namespace PENSTOCK_ISA
