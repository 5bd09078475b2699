// The wgmma instruction for the ROWS that a kernel is compiled for: sums[64, ROWS] += a[64, 32 bytes] b[ROWS, 32 bytes]^T,
// both in shared memory (`swizzled_tile`). Of a warp's 16 channels a thread has the sums of lane / 4 and of that + 8, of every
// 8 rows those of 2 (lane % 4) and of that + 1: sums[row / 8 * 4 + channel / 8 * 2 + row % 2].
#pragma once
#include "device.cuh"

#define EIGHT(i) \
    "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), "+f"(sums[i + 5]), \
        "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_80 NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_88 NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NAMES_96 NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_104 NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NAMES_112 NAMES_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES_120 NAMES_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NAMES_128 NAMES_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_8 EIGHT(0)
#define SUMS_16 SUMS_8, EIGHT(8)
#define SUMS_24 SUMS_16, EIGHT(16)
#define SUMS_32 SUMS_24, EIGHT(24)
#define SUMS_40 SUMS_32, EIGHT(32)
#define SUMS_48 SUMS_40, EIGHT(40)
#define SUMS_56 SUMS_48, EIGHT(48)
#define SUMS_64 SUMS_56, EIGHT(56)
#define SUMS_72 SUMS_64, EIGHT(64)
#define SUMS_80 SUMS_72, EIGHT(72)
#define SUMS_88 SUMS_80, EIGHT(80)
#define SUMS_96 SUMS_88, EIGHT(88)
#define SUMS_104 SUMS_96, EIGHT(96)
#define SUMS_112 SUMS_104, EIGHT(104)
#define SUMS_120 SUMS_112, EIGHT(112)
#define SUMS_128 SUMS_120, EIGHT(120)

#if ROWS == 16
#define SHAPE "m64n16"
#define OPERANDS "{" NAMES_8 "}, %8, %9"
#define SUMS SUMS_8
#elif ROWS == 32
#define SHAPE "m64n32"
#define OPERANDS "{" NAMES_16 "}, %16, %17"
#define SUMS SUMS_16
#elif ROWS == 64
#define SHAPE "m64n64"
#define OPERANDS "{" NAMES_32 "}, %32, %33"
#define SUMS SUMS_32
#elif ROWS == 96
#define SHAPE "m64n96"
#define OPERANDS "{" NAMES_48 "}, %48, %49"
#define SUMS SUMS_48
#elif ROWS == 128
#define SHAPE "m64n128"
#define OPERANDS "{" NAMES_64 "}, %64, %65"
#define SUMS SUMS_64
#elif ROWS == 160
#define SHAPE "m64n160"
#define OPERANDS "{" NAMES_80 "}, %80, %81"
#define SUMS SUMS_80
#elif ROWS == 192
#define SHAPE "m64n192"
#define OPERANDS "{" NAMES_96 "}, %96, %97"
#define SUMS SUMS_96
#elif ROWS == 224
#define SHAPE "m64n224"
#define OPERANDS "{" NAMES_112 "}, %112, %113"
#define SUMS SUMS_112
#elif ROWS == 256
#define SHAPE "m64n256"
#define OPERANDS "{" NAMES_128 "}, %128, %129"
#define SUMS SUMS_128
#endif
#if FP8
#define FORM "k32.f32.e4m3.e4m3 "
#define FLAGS ", 1, 1, 1;"
#else
#define FORM "k16.f32.bf16.bf16 "
#define FLAGS ", 1, 1, 1, 0, 0;"
#endif

DEVICE void wgmma(float (&sums)[ROWS / 2], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned." SHAPE FORM OPERANDS FLAGS : SUMS : "l"(a), "l"(b));
}
