// A stand-in for an accelerator: a device type of its own over the CPU's memory, and
// collectives (gloo's) that refuse what NCCL refuses. It has no sparse tensors, so that
// sparse gradients fail, too. sitecustomize.py builds and registers it.
//
// It shows that all that belongs on a device is there, and what waits for it. Each device
// has random numbers of its own, by the CPU's algorithm. It computes as the CPU does, one
// operation after the other: it shows neither speed nor races.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

using at::Tensor, c10::Device, c10::DeviceIndex, c10::Stream;
using Tensors = std::vector<Tensor>;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const auto KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

thread_local DeviceIndex current = 0;
thread_local bool falling_back = false;  // to a kernel of the CPU
std::map<std::string, int> seen;         // what costs time on a GPU, or fails there

int setting(const char* name, int otherwise) {
  auto text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}
int count() { return setting("STANDIN_DEVICES", 2); }

// Memory, devices, streams and events

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto memory = size ? std::malloc(size) : nullptr;
    return {memory, memory, &std::free, Device(TYPE, current)};
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
} allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<TYPE> {
  Device getDevice() const override { return {TYPE, current}; }
  void uncheckedSetDevice(Device x) const noexcept override { current = x.index(); }
  void setDevice(Device x) const override {
    TORCH_CHECK(x.index() >= 0 && x.index() < count(), "invalid device ordinal\nas CUDA says it, in several lines");
    current = x.index();
  }
  Device exchangeDevice(Device x) const override { auto old = getDevice(); setDevice(x); return old; }
  DeviceIndex deviceCount() const noexcept override { return count(); }
  Stream getStream(Device x) const noexcept override { return Stream(Stream::DEFAULT, x); }
  Stream getNewStream(Device x, int) const override { return getStream(x); }
  Stream exchangeStream(Stream x) const noexcept override { return getStream(x.device()); }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new double;
    *(double*)*event = c10::getTime() * 1e-6;  // ms
  }
  double elapsedTime(void* a, void* b, DeviceIndex) const override { return *(double*)b - *(double*)a; }
  void destroyEvent(void* x, DeviceIndex) const noexcept override { delete (double*)x; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { seen["waits"]++; }
  void synchronizeStream(const Stream&) const override { seen["waits"]++; }
  void synchronizeDevice(DeviceIndex) const override { seen["waits"]++; }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// One per device, as torch.cuda.default_generators. Made once: they hold what is drawn next.
const at::Generator& own_generator(DeviceIndex index) {
  static std::vector<at::Generator> all;
  while (all.size() <= (size_t)index) all.push_back(at::make_generator<at::CPUGeneratorImpl>());
  return all[index];
}

// While it lives, the CPU's kernels draw from the device's generator, not from the CPU's.
struct DrawFrom {
  at::Generator cpu = at::detail::getDefaultCPUGenerator(), own;
  Tensor kept = cpu.get_state();
  explicit DrawFrom(DeviceIndex index) : own(own_generator(index)) { cpu.set_state(own.get_state()); }
  ~DrawFrom() {
    own.set_state(cpu.get_state());
    cpu.set_state(kept);
  }
};

struct Hooks : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return own_generator(index < 0 ? current : index); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  Device getDeviceFromPtr(void*) const override { return {TYPE, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto memory = allocator.allocate(size);
    std::memcpy(memory.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(size);
  }
};

// Operations: those that must not copy, and for all others the kernels of the CPU

Tensor on_cpu(const Tensor& x) {  // the same memory
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), x.options().device(at::kCPU));
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Place = std::optional<Device>;
using Pinned = std::optional<bool>;
using Sizes = at::IntArrayRef;

Tensor empty(Sizes sizes, Dtype dtype, Layout, Place x, Pinned, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(x && x->has_index() ? *x : Device(TYPE, current));
  auto kind = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(sizes, &allocator, KEYS, kind, format);
}
Tensor empty_strided(Sizes sizes, Sizes strides, Dtype dtype, Layout, Place x, Pinned) {
  c10::DeviceGuard guard(x && x->has_index() ? *x : Device(TYPE, current));
  auto kind = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, KEYS, kind);
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool crosses = from.is_cpu() != to.is_cpu();
  if (crosses && !non_blocking && !falling_back) seen["copies that wait"]++;
  (to.is_cpu() ? to : on_cpu(to)).copy_(from.is_cpu() ? from : on_cpu(from));
  return to;
}
at::Scalar item(const Tensor& x) {
  if (!falling_back) seen["waits"]++;
  return at::native::_local_scalar_dense_cpu(on_cpu(x));
}
Tensor& set_storage(Tensor& x, at::Storage whole) {
  return at::native::set_storage_cpu_(x, whole, 0, {(int64_t)whole.nbytes() / x.dtype().itemsize()}, {});
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<Device> device;
  for (auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor() && value.toTensor().defined()) {
      auto& x = value.toTensor();
      if (x.is_cpu() && x.dim()) seen["tensors on the CPU"]++;
      if (x.is_cpu()) continue;
      TORCH_CHECK(!device || *device == x.device(), op.schema().name(), ": on two devices");
      device = x.device();
    }
  }
  bool before = std::exchange(falling_back, true);
  c10::DeviceGuard guard(device.value_or(Device(TYPE, current)));
  std::optional<DrawFrom> drawn;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) drawn.emplace(current);
  at::native::cpu_fallback(op, stack);
  falling_back = before;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", [](const Tensor& a, const Tensor& b) { return copy_from(a, b.resize_(a.sizes()), false); });
  m.impl("_local_scalar_dense", item);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // what the scripts use of CUDA's list
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
}

// Collectives: gloo's, on the same memory, if NCCL would take the tensors

struct Strict : c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<Backend> gloo;
  bool connected = false;
  Strict(c10::intrusive_ptr<Backend> x) : Backend(x->getRank(), x->getSize()), gloo(x) {}
  const std::string getBackendName() const override { return "strict"; }

  DeviceIndex bound() {  // as in PyTorch 2.15, whatever device is the current one
    if (auto device = getBoundDeviceId()) return device->index();
    return setting("LOCAL_RANK", getRank()) % count();
  }
  void connect() {
    if (std::exchange(connected, true)) return;
    Tensors mine{at::tensor({setting("STANDIN_HOST", 0), (int)bound()})};
    std::vector<Tensors> all{Tensors(getSize())};
    for (auto& x : all[0]) x = at::empty_like(mine[0]);
    gloo->allgather(all, mine)->wait();
    for (int i = 0; i < getSize(); i++)
      TORCH_CHECK(i == getRank() || !all[0][i].equal(mine[0]), "ranks ", getRank(), " and ", i, " use one device");
  }
  Tensor taken(const Tensor& x) {
    connect();
    return checked(x);
  }
  Tensor checked(const Tensor& x) {
    TORCH_CHECK(x.device().type() == TYPE, "No backend type associated with device type cpu");
    TORCH_CHECK(x.device().index() == bound(), "bound to device ", bound(), ", not ", x.device());
    TORCH_CHECK(x.is_contiguous(x.suggest_memory_format()), "Tensors must be contiguous");
    return on_cpu(x.detach());
  }
  template <class All>
  All taken(const All& all) {
    All found;
    for (auto& x : all) found.push_back(taken(x));
    return found;
  }
  template <class Result>
  Work done(Work work, Result result) {
    work->wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::getTypePtr<Result>());
    future->markCompleted(result);
    return c10d::Work::create_from_future(future);
  }
#define IN_PLACE(name, Options)                                   \
  Work name(Tensors& x, const c10d::Options& options) override {  \
    auto mine = taken(x);                                         \
    return done(gloo->name(mine, options), x);                    \
  }
#define FROM_TO(name, In, Out, Options)                                 \
  Work name(Out& out, In& in, const c10d::Options& options) override {  \
    auto to = taken(out);                                               \
    auto from = taken(in);                                              \
    return done(gloo->name(to, from, options), out);                    \
  }
  IN_PLACE(broadcast, BroadcastOptions)
  IN_PLACE(allreduce, AllreduceOptions)
  FROM_TO(allgather, Tensors, std::vector<Tensors>, AllgatherOptions)
  FROM_TO(gather, Tensors, std::vector<Tensors>, GatherOptions)
  FROM_TO(scatter, std::vector<Tensors>, Tensors, ScatterOptions)
  FROM_TO(_allgather_base, Tensor, Tensor, AllgatherOptions)
  FROM_TO(allgather_into_tensor_coalesced, Tensors, Tensors, AllgatherOptions)
  FROM_TO(_reduce_scatter_base, Tensor, Tensor, ReduceScatterOptions)
  FROM_TO(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatterOptions)
  Work barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("count", &count);
  m.def("seen", [] { return seen; });
  m.def("current", [] { return current; });
  m.def("generator", [](int index) { return own_generator(index); });
  m.def("set_current", [](int x) { Guard().setDevice({TYPE, (DeviceIndex)x}); });
  using Backend = c10::intrusive_ptr<c10d::Backend>;
  m.def("strict", [](Backend gloo) -> Backend { return c10::make_intrusive<Strict>(gloo); });
}
