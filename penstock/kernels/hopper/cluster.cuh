// Instructions for clusters: CTAs that read each other's shared memory.
#pragma once
#include "device.cuh"

DEVICE float4 load_from_cta(const float* place, u32 block) {
    float4 out;
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %4, %5;"
        " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
        : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
        : "r"(shared_address(place)), "r"(block)
        : "memory");
    return out;
}
// Barrier of all threads of a cluster; what was written to shared memory before is seen after. A fence of the CTA is enough
// for that; the release that the barrier can make would wait for the whole device.
DEVICE void sync_cluster() {
    asm volatile(
        "fence.acq_rel.cta;\nbarrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Barrier of a cluster without memory ordering.
DEVICE void sync_cluster_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Arrives at that CTA's mbarrier in the same place. What has been read before it is not read later.
DEVICE void arrive_at(u64* barrier, u32 block) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
        "r"(block)
        : "memory");
}
// Multicast copy to the same place of both CTAs of a pair, where their mbarriers in the same place count the bytes.
DEVICE void copy_box_to_both(void* to, const TensorMap* map, int column, int row, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<u64>(map)), "r"(column), "r"(row), "r"(shared_address(barrier)),
        "h"(static_cast<unsigned short>(3)), "l"(policy)
        : "memory");
}
DEVICE void copy_box_to_both(void* to, const TensorMap* map, int x, int y, int z, int w, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(shared_address(to)),
        "l"(reinterpret_cast<u64>(map)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)),
        "h"(static_cast<unsigned short>(3)), "l"(policy)
        : "memory");
}
