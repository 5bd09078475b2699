// The functions of penstock/kernels/hopper/cluster.cuh on the CPU. All CTAs of a cluster must be resident.
#pragma once
#include "device.cuh"

namespace gpu {

inline std::map<unsigned, Block*> met;  // by their index; known from the first meeting on
inline std::map<unsigned, Meeting> clusters;

inline unsigned cluster_of(unsigned index) { return index / machine.cluster; }

}  // namespace gpu

inline float4 load_from_cta(const float* place, u32 block) {
    gpu::Block* own = gpu::machine.current->block;
    gpu::Block* other = gpu::met.at(gpu::cluster_of(own->index.x) * gpu::machine.cluster + block);
    float4 out;
    std::memcpy(&out, other->shared + shared_address(place), sizeof out);
    return out;
}
inline void sync_cluster() {
    gpu::Block* block = gpu::machine.current->block;
    gpu::met[block->index.x] = block;
    gpu::gather(gpu::clusters[gpu::cluster_of(block->index.x)], gpu::machine.cluster * block->threads, true);
}
inline void sync_cluster_relaxed() { sync_cluster(); }

namespace gpu {

// As that CTA of the cluster; `shift` moves a pointer to shared memory there.
template <class Op>
void in_block(u32 block, Op op) {
    Block* own = machine.current->block;
    Block* other = met.at(cluster_of(own->index.x) * machine.cluster + block);
    machine.current->block = other;
    op(other->shared - own->shared);
    machine.current->block = own;
}

}  // namespace gpu

inline u64* moved(u64* barrier, long shift) {
    return reinterpret_cast<u64*>(reinterpret_cast<unsigned char*>(barrier) + shift);
}
inline void arrive_at(u64* barrier, u32 block) {
    gpu::in_block(block, [=](long shift) { arrive(moved(barrier, shift)); });
}
inline void copy_box_to_both(void* to, const TensorMap* map, int x, int y, int z, int w, u64* barrier, u64) {
    for (u32 block = 0; block < 2; block++)
        gpu::in_block(block, [=](long shift) {
            copy_box_at(static_cast<unsigned char*>(to) + shift, map, {x, y, z, w, 0}, moved(barrier, shift));
        });
}
inline void copy_box_to_both(void* to, const TensorMap* map, int column, int row, u64* barrier, u64 policy) {
    copy_box_to_both(to, map, column, row, 0, 0, barrier, policy);
}
