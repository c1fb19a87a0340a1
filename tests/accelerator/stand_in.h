// What the two halves of the stand-in accelerator share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace stand_in {

// A CPU tensor over the memory of a tensor of the stand-in. It keeps that memory alive.
at::Tensor on_cpu(const at::Tensor& tensor);

// The generator of a device that random ops use where none is passed; -1: of the current device.
at::Generator generator_of(c10::DeviceIndex device);

// Make the stand-in the accelerator of this process.
void register_device();

}  // namespace stand_in
