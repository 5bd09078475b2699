// Compiled once per instruction set: the build defines PENSTOCK_ISA (the namespace and table name) and the -m flags.
#include "attention.h"
#include "encoder_ops.h"
#if defined(__AMX_INT8__)
#include "gemm_amx.h"
#endif
#include "gemm_float.h"
#include "gemm_int4.h"
#include "gemm_int8.h"
#include "ops.h"
#include "sampling.h"

namespace PENSTOCK_ISA {

static void gemm(const Matrix& w, const Activations& x, Range rows, Range panels, const Output& out) {
    switch (w.scheme) {
#if defined(__AMX_INT8__)
        case INT8: return run_panels_amx<INT8, Int8Tile>(w, x, rows, panels, out);
        case INT4: return run_panels_amx<INT4, Int4Tile>(w, x, rows, panels, out);
        case BF16: return run_panels_amx<BF16, FloatTile>(w, x, rows, panels, out);
#else
        case INT8: return run_panels<Int8Tile>(w, x, rows, panels, out);
        case INT4: return run_panels<Int4Tile>(w, x, rows, panels, out);
        case BF16: return run_panels<FloatTile>(w, x, rows, panels, out);
#endif
        case F32: return run_panels<Float32Tile>(w, x, rows, panels, out);
    }
}

}  // namespace PENSTOCK_ISA

#define PENSTOCK_JOIN_(a, b) a##b
#define PENSTOCK_JOIN(a, b) PENSTOCK_JOIN_(a, b)
#define PENSTOCK_STRING_(a) #a
#define PENSTOCK_STRING(a) PENSTOCK_STRING_(a)

extern const penstock::Kernels penstock::PENSTOCK_JOIN(PENSTOCK_ISA, _kernels) = {
    PENSTOCK_STRING(PENSTOCK_ISA),
    PENSTOCK_ISA::gemm,
    PENSTOCK_ISA::quantize_row,
    PENSTOCK_ISA::hadamard,
    PENSTOCK_ISA::rms_norm,
    PENSTOCK_ISA::rotate,
    PENSTOCK_ISA::write_cache,
    PENSTOCK_ISA::attention_scratch,
    PENSTOCK_ISA::attend,
    PENSTOCK_ISA::merge_partials,
    PENSTOCK_ISA::dot_bf16,
    PENSTOCK_ISA::shrink,
    PENSTOCK_ISA::layer_norm,
    PENSTOCK_ISA::dense_scratch,
    PENSTOCK_ISA::attend_dense,
    PENSTOCK_ISA::block_maxima,
    PENSTOCK_ISA::mask_logits,
    PENSTOCK_ISA::count_above,
    PENSTOCK_ISA::masses,
    PENSTOCK_ISA::draw,
};
