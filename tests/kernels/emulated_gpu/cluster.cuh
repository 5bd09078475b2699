// The functions of penstock/kernels/hopper/cluster.cuh on the CPU. All blocks of a cluster must be resident.
#pragma once
#include "device.cuh"

namespace gpu {

inline std::map<unsigned, Block*> met;  // by their index; known from the first meeting on
inline std::map<unsigned, Meeting> clusters;

inline unsigned cluster_of(unsigned index) { return index / machine.cluster; }

}  // namespace gpu

inline float4 load_from_block(const float* place, u32 block) {
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
inline void meet_cluster() { sync_cluster(); }
