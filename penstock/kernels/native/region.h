// Memory for weights and buffers, and how pieces of it are handed out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack.h"

namespace penstock {

// Zeroed memory in huge pages where the system grants them: a weight stream then misses the TLB 512 times less.
class Region {
  public:
    Region() = default;
    explicit Region(size_t bytes);
    ~Region();
    Region(Region&& other) noexcept;
    Region& operator=(Region&& other) noexcept;
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// Hands out pieces of a region; with a null base it only measures.
struct Cursor {
    uint8_t* base;
    size_t used = 0;

    template <class T>
    T* take(size_t count) {
        T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += round_up(count * sizeof(T), 64);
        return at;
    }

    Matrix matrix(int32_t scheme, int n, int k, bool bias) {
        Matrix m{Scheme(scheme), n, k, int32_t(round_up(k, GROUP)), nullptr, nullptr};
        const size_t columns = size_t(m.num_panels()) * PANEL;
        if (bias) m.bias = take<float>(columns);
        m.panels = take<uint8_t>(m.num_panels() * m.panel_bytes());
        if (base) clear(m);
        return m;
    }
};

}  // namespace penstock
