// The functions of penstock/kernels/hopper/cluster.cuh on the CPU. All blocks of a cluster must be resident.
#pragma once
#include "device.cuh"

namespace gpu {

inline std::map<unsigned, Block*> met;  // by their index; known from the first meeting on
inline std::map<unsigned, Meeting> clusters;

inline unsigned cluster_of(unsigned index) { return index / machine.cluster; }

// Does something as if it were done in another block of the cluster.
template <class Op>
void as_block(u32 block, Op op) {
    Fiber* own = machine.current;
    Fiber there;
    there.block = met.at(cluster_of(own->block->index.x) * machine.cluster + block);
    there.thread = own->thread;
    machine.current = &there;
    op(there.block->shared - own->block->shared);
    machine.current = own;
}

}  // namespace gpu

inline void copy_box_4d(void* to, const TensorMap* map, int a, int b, int c, int d, u64* barrier, u64) {
    copy_box_at(to, map, {a, b, c, d, 0}, barrier);
}
inline void copy_box_to_blocks(void* to, const TensorMap* map, int column, int row, u64* barrier, u32 blocks, u64 policy) {
    for (u32 block = 0; block < 16; block++)
        if (blocks >> block & 1)
            gpu::as_block(block, [&](ptrdiff_t away) {
                u64* its = reinterpret_cast<u64*>(reinterpret_cast<unsigned char*>(barrier) + away);
                copy_box(static_cast<unsigned char*>(to) + away, map, column, row, its, policy);
            });
}
inline void arrive_at_block(u64* barrier, u32 block) {
    gpu::as_block(block, [&](ptrdiff_t away) {
        arrive(reinterpret_cast<u64*>(reinterpret_cast<unsigned char*>(barrier) + away));
    });
}
inline float4 load_from_block(const float* place, u32 block) {
    float4 out;
    gpu::as_block(block, [&](ptrdiff_t away) {
        std::memcpy(&out, reinterpret_cast<const unsigned char*>(place) + away, sizeof out);
    });
    return out;
}
inline void sync_cluster() {
    gpu::Block* block = gpu::machine.current->block;
    gpu::met[block->index.x] = block;
    gpu::gather(gpu::clusters[gpu::cluster_of(block->index.x)], gpu::machine.cluster * block->threads, true);
}
inline void meet_cluster() { sync_cluster(); }
