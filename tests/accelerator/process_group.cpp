// The process-group backend of the stand-in accelerator, and its Python module.
//
// It sends by gloo what lies in the memory of a stand-in, and refuses what NCCL refuses: tensors of the CPU,
// tensors that are not contiguous, int16.

#include "stand_in.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace stand_in {
namespace {

using Tensors = std::vector<at::Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

at::Tensor sent(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1, "the backend of the stand-in got a tensor on ", tensor.device(), " of shape ", tensor.sizes());
  TORCH_CHECK(tensor.is_contiguous(), "the backend of the stand-in got a tensor that is not contiguous");
  TORCH_CHECK(tensor.scalar_type() != at::kShort, "the backend of the stand-in does not send int16, as NCCL does not");
  return on_cpu(tensor);
}

Tensors sent(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) {
    all.push_back(sent(tensor));
  }
  return all;
}

std::vector<Tensors> sent(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (const auto& tensors : lists) {
    all.push_back(sent(tensors));
  }
  return all;
}

class StandInBackend final : public c10d::Backend {
 public:
  explicit StandInBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "standin_ccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto all = sent(tensors);
    return gloo_->broadcast(all, options);
  }
  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto all = sent(tensors);
    return gloo_->allreduce(all, options);
  }
  Pending reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto all = sent(tensors);
    return gloo_->reduce(all, options);
  }
  Pending allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto to = sent(out);
    auto from = sent(in);
    return gloo_->allgather(to, from, options);
  }
  Pending _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = sent(out), from = sent(in);
    return gloo_->_allgather_base(to, from, options);
  }
  Pending reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    auto to = sent(out);
    auto from = sent(in);
    return gloo_->reduce_scatter(to, from, options);
  }
  Pending _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = sent(out), from = sent(in);
    return gloo_->_reduce_scatter_base(to, from, options);
  }
  Pending alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto to = sent(out), from = sent(in);
    return gloo_->alltoall_base(to, from, out_sizes, in_sizes, options);
  }
  Pending gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    auto to = sent(out);
    auto from = sent(in);
    return gloo_->gather(to, from, options);
  }
  Pending scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    auto to = sent(out);
    auto from = sent(in);
    return gloo_->scatter(to, from, options);
  }
  Pending send(Tensors& tensors, int to, int tag) override {
    auto all = sent(tensors);
    return gloo_->send(all, to, tag);
  }
  Pending recv(Tensors& tensors, int from, int tag) override {
    auto all = sent(tensors);
    return gloo_->recv(all, from, tag);
  }
  Pending barrier(const c10d::BarrierOptions& options) override {
    return gloo_->barrier(options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace
}  // namespace stand_in

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_device", &stand_in::register_device);
  module.def("generator_of", &stand_in::generator_of);
  py::module_::import("torch.distributed");  // defines the base class
  py::class_<stand_in::StandInBackend, c10d::Backend, c10::intrusive_ptr<stand_in::StandInBackend>>(module, "StandInBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}
