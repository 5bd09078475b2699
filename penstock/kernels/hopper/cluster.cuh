// Blocks of one cluster, which read each other's shared memory.
#pragma once
#include "device.cuh"

DEVICE float4 load_from_block(const float* place, u32 block) {
    float4 out;
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
        " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
        : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
        : "r"(shared_address(place)), "r"(block)
        : "memory");
    return out;
}
// All threads of all blocks; what was written to shared memory before is seen after. It is there once a fence of the block
// has passed; the release that the barrier can make would wait for the whole device.
DEVICE void sync_cluster() {
    asm volatile(
        "fence.acq_rel.cta;\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where nothing was written for the others.
DEVICE void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
