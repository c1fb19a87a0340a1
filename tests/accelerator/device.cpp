// A device that is not the CPU, for tests on machines without an accelerator.
//
// Its memory is host memory under another device tag, and each op runs as the CPU's kernel on an alias of its
// arguments, so results are the CPU's to the last bit. What makes it a test of device handling:
//
//   - an op that mixes its tensors with the CPU's, or with those of another stand-in, raises, with the exceptions
//     that CUDA makes (0-dim CPU tensors in pointwise ops, CPU indices);
//   - it has its own generators, streams, events, autocast and pinned memory;
//   - backward runs on a thread of the device, as for every accelerator.

#include "stand_in.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace stand_in {
namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[DEVICES] = {};

// -- memory -------------------------------------------------------------------------------------

std::atomic<int64_t> allocated[DEVICES], peak[DEVICES];

struct Block {
  c10::DataPtr memory;
  c10::DeviceIndex device;
  int64_t bytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->device] -= block->bytes;
  delete block;
}

// Host memory, from here on memory of a stand-in.
c10::DataPtr adopt(c10::DataPtr memory, size_t bytes, c10::DeviceIndex device) {
  void* data = memory.get();
  auto now = allocated[device] += static_cast<int64_t>(bytes);
  for (auto most = peak[device].load(); now > most && !peak[device].compare_exchange_weak(most, now);) {
  }
  auto* block = new Block{std::move(memory), device, static_cast<int64_t>(bytes)};
  return {data, block, &free_block, c10::Device(KIND, device)};
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return adopt(c10::GetCPUAllocator()->allocate(bytes), bytes, current_device);
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = allocated[device];
    stats.allocated_bytes[0].peak = peak[device];
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    peak[device] = allocated[device].load();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    constexpr size_t all = size_t(1) << 33;
    return {all - allocated[device], all};
  }
};

std::mutex pinned_lock;
std::map<const void*, size_t> pinned_memory;

struct Pinned {
  c10::DataPtr memory;
};

void free_pinned(void* context) {
  auto* pinned = static_cast<Pinned*>(context);
  {
    std::lock_guard guard(pinned_lock);
    pinned_memory.erase(pinned->memory.get());
  }
  delete pinned;
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    void* data = memory.get();
    std::lock_guard guard(pinned_lock);
    pinned_memory[data] = bytes;
    return {data, new Pinned{std::move(memory)}, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

Memory memory;
PinnedMemory pinned;

// -- generators ---------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();

  explicit Generator(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(KIND, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    cpu.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    cpu.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return cpu.get_offset();
  }
  uint64_t current_seed() const override {
    return cpu.current_seed();
  }
  uint64_t seed() override {
    return cpu.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < DEVICES; ++index) {
      made->push_back(at::make_generator<Generator>(index));
    }
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

// -- devices, streams, events -------------------------------------------------------------------

struct Event {
  std::chrono::steady_clock::time_point when;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return KIND;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {KIND, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == KIND && device.index() < DEVICES, "no such device: ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index() < 0 ? current_device : device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, index), current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    auto index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, index), ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->when = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return DEVICES;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto passed = static_cast<Event*>(to)->when - static_cast<Event*>(from)->when;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return DEVICES;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({KIND, device});
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : Guard().exchangeDevice({KIND, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard guard(pinned_lock);
    auto after = pinned_memory.upper_bound(data);
    if (after == pinned_memory.begin()) {
      return false;
    }
    --after;
    return static_cast<const char*>(data) < static_cast<const char*>(after->first) + after->second;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = adopt(c10::GetCPUAllocator()->allocate(bytes), bytes, impl->device().index());
    if (auto kept = std::min(bytes, impl->nbytes()); kept != 0) {
      std::memcpy(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

// -- ops ----------------------------------------------------------------------------------------

void release_storage(void* context) {
  delete static_cast<c10::Storage*>(context);
}

// The arguments of one call on the CPU, and the way back.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  c10::IValue to_cpu(const c10::IValue& value) {
    if (value.isTensor()) {
      return to_cpu(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        all.push_back(to_cpu(tensor));
      }
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        all.push_back(tensor ? std::optional<at::Tensor>(to_cpu(*tensor)) : std::nullopt);
      }
      return all;
    }
    if (value.isStorage()) {
      return storage_on_cpu(value.toStorage());
    }
    if (value.isDevice() && value.toDevice().type() == KIND) {
      see(value.toDevice().has_index() ? value.toDevice() : c10::Device(KIND, current_device));
      return c10::Device(c10::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().defined()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == KIND, op_.schema().name(), " on a stand-in got a generator for ", generator.device());
      return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
    }
    return value;
  }

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return tensor;
    }
    if (tensor.device().type() != KIND) {
      TORCH_CHECK(tensor.is_cpu(), op_.schema().name(), " got a tensor on ", tensor.device());
      check_host(tensor);
      return tensor;
    }
    see(tensor.device());
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        storage_on_cpu(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      impl->set_wrapped_number(true);
    }
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    tensors_.emplace(impl, std::pair(tensor, alias));
    return alias;
  }

  // What an alias has become: an `out=` argument may have been resized.
  void update() {
    for (auto& [impl, pair] : tensors_) {
      auto& [tensor, alias] = pair;
      if (!tensor.sizes().equals(alias.sizes()) || !tensor.strides().equals(alias.strides()) ||
          tensor.storage_offset() != alias.storage_offset()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
      auto known = storages_.find(alias.storage().unsafeGetStorageImpl());
      if (known == storages_.end()) {  // set_ to memory that the op has made
        tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage_here(alias.storage()));
      } else if (!known->second.is_alias_of(tensor.storage())) {
        tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(known->second);
      }
    }
    for (auto& [alias, storage] : storages_) {
      if (alias->data() != storage.data() || alias->nbytes() != storage.nbytes()) {
        auto bytes = alias->nbytes();
        auto data = alias->set_data_ptr(c10::DataPtr());
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(adopt(std::move(data), bytes, device().index()));
        storage.unsafeGetStorageImpl()->set_nbytes(bytes);
      }
    }
  }

  c10::IValue from_cpu(const c10::IValue& value) {
    if (value.isTensor()) {
      return from_cpu(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        all.push_back(from_cpu(tensor));
      }
      return all;
    }
    return value;
  }

  at::Tensor from_cpu(const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    if (auto known = tensors_.find(result.unsafeGetTensorImpl()); known != tensors_.end()) {
      return known->second.first;  // written in place
    }
    auto known = storages_.find(result.storage().unsafeGetStorageImpl());
    auto storage = known != storages_.end() ? known->second : storage_here(result.storage());
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    tensor._set_conj(result.is_conj());
    tensor._set_neg(result.is_neg());
    return tensor;
  }

  c10::Device device() const {
    TORCH_INTERNAL_ASSERT(device_, op_.schema().name());
    return *device_;
  }

 private:
  void see(c10::Device device) {
    TORCH_CHECK(!device_ || *device_ == device, "Expected all tensors of ", op_.schema().name(),
                " to be on the same device, but found at least two devices, ", *device_, " and ", device);
    device_ = device;
  }

  // CUDA takes numbers in CPU tensors, and indices, and nothing else.
  void check_host(const at::Tensor& tensor) {
    const auto& name = op_.schema().name();
    bool number = tensor.dim() == 0 && (tensor.unsafeGetTensorImpl()->is_wrapped_number() || op_.hasTag(at::Tag::pointwise) || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::fill_" || name == "aten::masked_fill_");
    bool index = (name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_") && !c10::isFloatingType(tensor.scalar_type());
    bool copied = name == "aten::set_" || name == "aten::_copy_from";
    TORCH_CHECK(number || index || copied, "Expected all tensors of ", name, " to be on the same device, but found one on the CPU, of shape ", tensor.sizes(), ", beside one on a stand-in");
  }

  c10::Storage storage_on_cpu(const c10::Storage& storage) {
    auto* key = storage.unsafeGetStorageImpl();
    if (auto known = aliases_.find(key); known != aliases_.end()) {
      return known->second;
    }
    c10::DataPtr data(key->mutable_data(), new c10::Storage(storage), &release_storage, c10::Device(c10::kCPU));
    auto alias = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), key->nbytes(), std::move(data), c10::GetCPUAllocator(), true));
    aliases_.emplace(key, alias);
    storages_.emplace(alias.unsafeGetStorageImpl(), storage);
    return alias;
  }

  c10::Storage storage_here(const c10::Storage& storage) {
    auto* impl = storage.unsafeGetStorageImpl();
    if (auto known = fresh_.find(impl); known != fresh_.end()) {
      return known->second;
    }
    c10::DataPtr data(impl->mutable_data(), new c10::Storage(storage), &release_storage, c10::Device(c10::kCPU));
    auto bytes = impl->nbytes();
    auto here = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, adopt(std::move(data), bytes, device().index()), &memory, true));
    fresh_.emplace(impl, here);
    return here;
  }

  const c10::OperatorHandle& op_;
  std::optional<c10::Device> device_;
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_, storages_, fresh_;
};

// Run `kernel`, an op with the arguments of `op`, on the CPU.
void run(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, torch::jit::Stack* stack) {
  Call call(op);
  const auto& arguments = kernel.schema().arguments();
  auto start = stack->size() - arguments.size();
  for (auto at = start; at < stack->size(); ++at) {
    (*stack)[at] = call.to_cpu((*stack)[at]);
  }
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto& value = (*stack)[start + at];
    if (value.isNone() && arguments[at].name() == "generator") {
      auto& own = default_generator(call.device().index());
      value = static_cast<Generator*>(own.unsafeGetGeneratorImpl())->cpu;
    }
  }
  kernel.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.update();
  for (auto at = stack->size() - kernel.schema().returns().size(); at < stack->size(); ++at) {
    (*stack)[at] = call.from_cpu((*stack)[at]);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, op, stack);
}

c10::OperatorHandle find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// torch hands convolutions of unknown devices to ops of their own.
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run(op, find("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  auto with_bias = stack->back().toBoolList().get(2);
  auto sizes = with_bias ? c10::IValue(std::vector<int64_t>{first->toTensor().size(1)}) : c10::IValue();
  stack->insert(first + 3, sizes);
  run(op, find("aten::convolution_backward"), stack);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  auto here = from.device().type() == KIND ? on_cpu(from) : from;
  auto there = to.device().type() == KIND ? on_cpu(to) : to;
  there.copy_(here);
  return to;
}

// -- autocast -----------------------------------------------------------------------------------

void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  for (auto at = stack->size() - op.schema().arguments().size(); at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isTensor() && value.toTensor().defined()) {
      const auto& tensor = value.toTensor();
      if (tensor.device().type() == KIND && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble) {
        value = tensor.to(dtype);
      }
    }
  }
  op.callBoxed(stack);
}

void cast_down(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast(op, stack, at::autocast::get_autocast_dtype(KIND));
}

void cast_up(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast(op, stack, at::kFloat);
}

}  // namespace

at::Tensor on_cpu(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == KIND, "not on a stand-in: a tensor on ", tensor.device());
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &release_storage, c10::Device(c10::kCPU));
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::make_intrusive<c10::StorageImpl>(
          c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false)),
      c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

at::Generator generator_of(c10::DeviceIndex device) {
  return default_generator(device);
}

void register_device() {
  static Hooks hooks;
  c10::SetAllocator(KIND, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "scaled_dot_product_attention"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_down>());
  }
  for (const char* name : {"layer_norm", "nll_loss", "cross_entropy_loss", "mse_loss", "rsqrt", "softmax.int", "log_softmax.int", "pow.Tensor_Scalar", "sum", "cumsum"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast_up>());
  }
}

}  // namespace stand_in
