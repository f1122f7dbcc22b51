// A CUDA device in name only, for a build of torch without CUDA: `cuda:0` exists, and nothing runs there.
//
// torch asks two registries whether a kind of device exists: for the guard that switches to a device, which autograd
// and every factory go through, and for the hooks that tell what the CUDA library can do. Both are asked once, so this
// library is loaded before torch is imported.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

// One, or one for each rank of a launch by torchrun.
c10::DeviceIndex device_count() {
  const char* ranks = std::getenv("LOCAL_WORLD_SIZE");
  return static_cast<c10::DeviceIndex>(ranks ? std::atoi(ranks) : 1);
}

struct NamedGuard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device device) const noexcept override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream last) const noexcept override { return last; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  // Autograd orders its streams by events. Here is one stream, whose work is done at once.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}

 private:
  static c10::Stream stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
};

C10_REGISTER_GUARD_IMPL(CUDA, NamedGuard)

}  // namespace

namespace at {

// Registered under the name of its class, which is the one that torch asks for.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }  // draws nothing
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
