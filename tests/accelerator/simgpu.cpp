// A simulated accelerator for PyTorch: the device "simgpu", on the extension point PrivateUse1.
//
// Its memory is host memory, and its kernels are those of the CPU, on copies. What matters is what
// surrounds them. As CUDA does, it
//   - refuses CPU tensors in a kernel, tensors of two devices, and any use after fork();
//   - keeps autocast, random numbers, pinned memory and the current device of its own;
//   - returns from a non_blocking copy to pinned memory before the data has arrived (NaN until the
//     host waits), and reads the source of a non_blocking copy until then.
// Unlike CUDA, it fills new and freed memory with NaN, and reports to Python each copy, each
// collective and each operation for which the host waits.
//
// It says nothing about speed, the order of streams, CUDA's kernels or NCCL: see tests/README.md.
// The mechanism: https://docs.pytorch.org/tutorials/advanced/privateuseone.html; PyTorch's own
// example is test/cpp_extensions/open_registration_extension/torch_openreg.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace simgpu {
namespace py = pybind11;
using at::Tensor;
using c10::DeviceIndex;
using Tensors = std::vector<Tensor>;

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr int NOT_A_NUMBER = 0xFF;  // in each byte: NaN for floats, -1 for integers
// CUDA copies up to 64 KiB from pageable memory without waiting (CUDA Programming Guide,
// "Asynchronous Concurrent Execution"). With more, the driver may wait.
constexpr size_t SMALL_COPY = 64 << 10;

static int devices = 0;
static thread_local DeviceIndex current = 0;
static bool forked = false;

static void refuse_after_fork() {
  TORCH_CHECK(!forked, "Cannot re-initialize SIMGPU in forked subprocess");
}

// ------------------------------------------------------------------------------------- Reports
static py::function* reporter = nullptr;  // report() of simgpu.py
static thread_local bool in_kernel = false;  // the copies of a kernel or a collective do not count

struct Kernel {  // while it exists, this thread is in a kernel
  bool before = in_kernel;
  Kernel() { in_kernel = true; }
  ~Kernel() { in_kernel = before; }
};

static void report(const char* kind, const std::string& what, size_t bytes = 0) {
  if (in_kernel || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  (*reporter)(kind, what, bytes);
}

// ------------------------------------------------------------------------ Non-blocking copies
struct Copy {
  Tensor host;  // pinned
  Tensor data;  // what arrives there, or what it contained when it was copied to the device
  bool to_host;
};
static std::vector<Copy> unfinished;
static std::mutex unfinished_mutex;

static void wait_for_device(const std::string& what, size_t bytes = 0) {
  report("wait", what, bytes);
  std::vector<Copy> copies;
  {
    std::lock_guard<std::mutex> lock(unfinished_mutex);
    copies.swap(unfinished);
  }
  Kernel kernel;
  for (auto& copy : copies) {
    if (copy.to_host) {
      copy.host.copy_(copy.data);
    } else {
      bool unchanged = std::memcmp(copy.host.data_ptr(), copy.data.data_ptr(), copy.host.nbytes()) == 0;
      TORCH_CHECK(unchanged, "the source of a non_blocking copy changed before it was read");
    }
  }
}

// -------------------------------------------------------------------------------------- Memory
struct Block {
  void* start;
  size_t bytes;
};

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    refuse_after_fork();
    auto* block = new Block{std::aligned_alloc(64, (bytes + 63) / 64 * 64), bytes};
    std::memset(block->start, NOT_A_NUMBER, bytes);
    return {block->start, block, &release, c10::Device(DEVICE, current)};
  }
  static void release(void* pointer) {
    auto* block = static_cast<Block*>(pointer);
    std::memset(block->start, NOT_A_NUMBER, block->bytes);
    std::free(block->start);
    delete block;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
static DeviceMemory device_memory;
static bool has_device_memory = (c10::SetAllocator(DEVICE, &device_memory), true);

static std::map<const char*, size_t> pinned;  // start: bytes
static std::mutex pinned_mutex;

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    refuse_after_fork();
    void* start = std::malloc(bytes + 1);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(start)] = bytes;
    return {start, start, &release, c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* start) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(static_cast<char*>(start));
    std::free(start);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(DEVICE, &pinned_memory)

static bool is_pinned(const void* pointer) {
  auto* start = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned.upper_bound(start);
  if (next == pinned.begin()) return false;
  auto block = std::prev(next);
  return start <= block->first + block->second;
}

// ------------------------------------------------------------------ Devices and random numbers
static void set_device(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < devices, "SIMGPU error: invalid device ordinal ", int(device));
  current = device;
}

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex device) {
    device_ = c10::Device(DEVICE, device);
    key_set_ = c10::DispatchKeySet(KEY);
  }
};

static const at::Generator& default_generator(DeviceIndex device) {
  static std::map<int, at::Generator> generators;
  int key = device < 0 ? current : device;
  if (!generators.count(key)) generators[key] = at::make_generator<Generator>(DeviceIndex(key));
  return generators[key];
}

// One stream, in which everything is done at once.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device getDevice() const override { return {DEVICE, current}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before{DEVICE, current};
    if (device.index() >= 0) set_device(device.index());
    return before;
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, {DEVICE, device.index() < 0 ? current : device.index()});
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("stream"); }
  void synchronizeEvent(void*) const override { wait_for_device("event"); }
  void synchronizeDevice(DeviceIndex) const override { wait_for_device("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(DeviceIndex device) const override { return device == current; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current;
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    auto before = current;
    if (device >= 0 && device < devices) current = device;
    return before;
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current : device);
  }
  void init() const override {}
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto data = device_memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
static bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ------------------------------------------------------ Operators that do not run on the CPU
static Tensor on_cpu(const Tensor& tensor) {  // the same memory
  auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

static Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(KEY), type, format);
}

static Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  auto type = c10::dtype_or_default(dtype);
  auto keys = c10::DispatchKeySet(KEY);
  return at::detail::empty_strided_generic(size, stride, &device_memory, keys, type);
}

static Tensor as_strided(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

static const Tensor& resize_(
    const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

static Tensor reshape_alias(
    const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  return at::native::_reshape_alias(self, sizes, C10_AS_INTARRAYREF_SLOW(stride));
}

static Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

static Tensor& set_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

static Tensor& set_storage_offset(
    Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// A copy for which the host need not wait: it is complete after the next wait.
static void copy_later(const Tensor& host, const Tensor& source, const Tensor& destination) {
  bool to_host = destination.is_same(host);
  Kernel kernel;
  Copy copy{host, source.clone(), to_host};
  if (to_host) {
    std::memset(host.data_ptr(), NOT_A_NUMBER, host.nbytes());
  } else {
    destination.copy_(source);
  }
  std::lock_guard<std::mutex> lock(unfinished_mutex);
  unfinished.push_back(copy);
}

static Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  refuse_after_fork();
  bool from_device = self.is_privateuseone();
  bool to_device = target.is_privateuseone();
  Tensor source = from_device ? on_cpu(self) : self;
  Tensor destination = to_device ? on_cpu(target) : target;
  bool within_device = from_device && to_device;
  if (!in_kernel && !within_device && self.numel() > 0) {
    const Tensor& host = from_device ? target : self;
    std::string what = from_device ? "copy to the host" : "copy to the device";
    bool is_block = host.is_contiguous() && (to_device || self.dtype() == target.dtype());
    if (non_blocking && is_block && is_pinned(host.const_data_ptr())) {
      report("pinned copy", what, self.nbytes());
      copy_later(host, source, destination);
      return target;
    }
    if (non_blocking && to_device && self.nbytes() <= SMALL_COPY) {
      report("pageable copy", what, self.nbytes());
    } else {
      wait_for_device(what, self.nbytes());
    }
  }
  Kernel kernel;
  destination.copy_(source);
  return target;
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  at::native::resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}

static at::Scalar item(const Tensor& self) {
  refuse_after_fork();
  wait_for_device("item()", self.nbytes());
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

// ------------------------------------------------------------- Operators that run on the CPU
// The size of their results depends on the data.
static const std::set<std::string> WAITING = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount", "aten::equal"};
// They take indices on the CPU (and copy them) and masks (and then call nonzero).
static const std::set<std::string> INDEXING = {
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

struct Arguments {  // what the arguments of an operator are
  std::optional<c10::Device> device;
  at::Generator* generator = nullptr;
  bool cpu_tensor = false;
  bool cpu_scalar = false;  // CUDA passes a tensor without dimensions to most kernels
  bool mask = false;

  void add(const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) {
      TORCH_CHECK(
          !device || *device == tensor.device(),
          "Expected all tensors to be on the same device, but found ", *device, " and ",
          tensor.device());
      device = tensor.device();
    } else if (tensor.dim() > 0) {
      cpu_tensor = true;
    } else if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      cpu_scalar = true;
    }
  }
};

static Arguments inspect(at::ArrayRef<c10::IValue> values) {
  Arguments found;
  for (const auto& value : values) {
    if (value.isTensor()) {
      found.add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) found.add(tensor);
    } else if (value.isOptionalTensorList()) {
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor) {
          found.add(*tensor);
          found.mask |= tensor->scalar_type() == at::kBool;
        }
      }
    } else if (value.isDevice() && !found.device) {
      found.device = value.toDevice();
    }
  }
  return found;
}

static void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_after_fork();
  const std::string& name = op.schema().operator_name().name;
  size_t count = op.schema().arguments().size();
  Arguments arguments = inspect(torch::jit::last(*stack, count));
  bool indexing = INDEXING.count(name);
  TORCH_CHECK(
      !arguments.cpu_tensor || indexing,
      "Expected all tensors to be on the same device, but found ", DEVICE, " and cpu in ", name);
  if (WAITING.count(name) || (indexing && arguments.mask)) wait_for_device(name);
  if (indexing && arguments.cpu_tensor) wait_for_device("indices on the CPU for " + name);
  if (name == "aten::where" && arguments.cpu_scalar) wait_for_device("CPU tensor in " + name);

  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    Kernel kernel;
    at::native::cpu_fallback(op, stack);
    return;
  }
  // The CPU's generator takes the state of the device's during the kernel.
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Generator ours = default_generator(arguments.device ? arguments.device->index() : current);
  for (auto& value : torch::jit::last(*stack, count)) {
    if (!value.isGenerator()) continue;
    ours = value.toGenerator();
    TORCH_CHECK(ours.device().type() == DEVICE, "Expected a generator of the device in ", name);
    const_cast<c10::IValue&>(value) = c10::IValue();  // none: the CPU's
  }
  Tensor cpu_state = cpu.get_state();
  cpu.set_state(ours.get_state());
  Kernel kernel;
  at::native::cpu_fallback(op, stack);
  ours.set_state(cpu.get_state());
  cpu.set_state(cpu_state);
}

static Tensor convolution(
    const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
    bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(x.device() == weight.device(), "convolution: ", x.device(), ", ", weight.device());
  TORCH_CHECK(x.dtype() == weight.dtype(), "convolution: ", x.dtype(), ", ", weight.dtype());
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  Kernel kernel;
  std::optional<Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = on_cpu(*bias);
  auto result = at::convolution_symint(
      on_cpu(x), on_cpu(weight), cpu_bias, stride, padding, dilation, transposed, output_padding,
      groups);
  return result.to(x.device());
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  Kernel kernel;
  c10::SymInt bias_size = weight.size(0);
  auto [for_x, for_weight, for_bias] = at::convolution_backward_symint(
      on_cpu(gradient), on_cpu(x), on_cpu(weight), c10::SymIntArrayRef(bias_size), stride, padding,
      dilation, transposed, output_padding, groups, wanted);
  auto to_device = [&](const Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {to_device(for_x), to_device(for_weight), to_device(for_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}
}  // namespace simgpu

// ------------------------------------------------------------------------------------ Autocast
namespace simgpu_autocast {
using namespace at;
using namespace at::autocast;
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_RESULT)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace simgpu_autocast

// --------------------------------------------------------------------------------- Collectives
namespace simgpu {
using namespace c10d;
using Pending = c10::intrusive_ptr<Work>;

struct Done final : Work {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  explicit Done(const Tensors& results) {
    auto type = c10::ListType::create(c10::TensorType::get());
    future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector{results[0].device()});
    future->markCompleted(c10::IValue(results));
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

// gloo, on copies in host memory. As "nccl", it has rules of NCCL: no CPU tensors, dense tensors,
// and one device per rank.
struct Collectives final : Backend {
  c10::intrusive_ptr<Backend> gloo;
  bool nccl;
  DeviceIndex device;
  Collectives(c10::intrusive_ptr<Backend> gloo, bool nccl, int device)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(gloo), nccl(nccl), device(device) {}
  // DistributedDataParallel casts what is called "gloo" or "nccl".
  const std::string getBackendName() const override { return nccl ? "simnccl" : "simgloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }

  bool is_on_host(const Tensor& tensor, const char* what) {
    if (!tensor.is_privateuseone()) {
      TORCH_CHECK(!nccl, what, ": No backend type associated with device type cpu");
      return true;
    }
    refuse_after_fork();
    if (nccl) {
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), what, ": Tensors must be contiguous");
      TORCH_CHECK(tensor.get_device() == device, what, ": not the device of this rank");
    }
    report("collective", what, tensor.nbytes());
    return false;
  }
  static Tensors to_host(const Tensors& tensors) {
    Tensors copies;
    for (const Tensor& tensor : tensors) copies.push_back(on_cpu(tensor).clone());
    return copies;
  }
  static Pending to_device(const Tensors& copies, const Tensors& tensors) {
    Kernel kernel;
    for (size_t i = 0; i < tensors.size(); i++) on_cpu(tensors[i]).copy_(copies[i]);
    return c10::make_intrusive<Done>(tensors);
  }
  Pending broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    if (is_on_host(tensors[0], "broadcast")) return gloo->broadcast(tensors, options);
    Tensors copies = to_host(tensors);
    gloo->broadcast(copies, options)->wait();
    return to_device(copies, tensors);
  }
  Pending allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    if (is_on_host(tensors[0], "all_reduce")) return gloo->allreduce(tensors, options);
    Tensors copies = to_host(tensors);
    gloo->allreduce(copies, options)->wait();
    return to_device(copies, tensors);
  }
  Pending allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    if (is_on_host(inputs[0], "all_gather")) return gloo->allgather(outputs, inputs, options);
    Tensors copies = to_host(inputs);
    std::vector<Tensors> results{to_host(outputs[0])};
    gloo->allgather(results, copies, options)->wait();
    return to_device(results[0], outputs[0]);
  }
  // PyTorch 2.15 gathers Python objects with it.
  Pending all_gather_single(
      Tensor& output, Tensor& input, const AllgatherOptions& options) override {
    std::vector<Tensors> outputs{output.view({getSize(), -1}).unbind()};
    Tensors inputs{input.flatten()};
    return allgather(outputs, inputs, options);
  }
};

struct NoTimer final : Timer {  // DistributedDataParallel wants one
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, NoTimer)
}  // namespace simgpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simgpu;
  m.def("start", [](int count, py::function report) {
    devices = count;
    reporter = new py::function(report);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  });
  m.def("device_count", [] { return devices; });
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int device) { set_device(device); });
  m.def("is_forked", [] { return forked; });
  m.def("seed", [](int device, uint64_t seed) {
    at::Generator generator = default_generator(device);
    generator.set_current_seed(seed);
  });
  py::class_<Collectives, Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(py::init([](const c10::intrusive_ptr<Backend>& gloo, bool nccl, int device) {
        return c10::make_intrusive<Collectives>(gloo, nccl, device);
      }));
}
