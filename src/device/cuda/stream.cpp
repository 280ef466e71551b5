#include "device/cuda/stream.h"

#include "device/cuda/driver.h"

namespace raddle::cuda {

bool is_capturing(StreamHandle stream) {
  int status = 0;
  // The default stream cannot be asked while another one captures: then it is not this one.
  return driver().is_capturing(stream, &status) == 0 && status != 0;
}

u64 capture_of(StreamHandle stream) {
  int status = 0;
  u64 id = 0;
  const int result = driver().capture_info(stream, &status, &id, nullptr, nullptr, nullptr);
  return result == 0 && status != 0 ? id : 0;
}

Event::Event() {
  constexpr unsigned disable_timing = 2;  // such events are cheaper
  check(driver().create_event(&handle_, disable_timing), "creating an event");
}
Event::~Event() {
  if (handle_) driver().destroy_event(handle_);
}
void Event::record(StreamHandle stream) const {
  check(driver().record_event(handle_, stream), "recording an event");
}
bool Event::has_passed() const {
  const int result = driver().query_event(handle_);
  if (result == not_ready) return false;
  check(result, "work that was launched earlier");
  return true;
}
void Event::synchronize() const {
  check(driver().synchronize_event(handle_), "work that was launched earlier");
}
void Event::delay(StreamHandle stream) const {
  check(driver().wait_event(stream, handle_, 0), "making a stream wait");
}

namespace {
thread_local int scopes = 0;  // that are open; the outermost asks the driver
}  // namespace

OutsideCapture::OutsideCapture() : mode_(2) {  // relaxed
  if (scopes++ == 0) driver().exchange_capture_mode(&mode_);
}
OutsideCapture::~OutsideCapture() {
  if (--scopes == 0) driver().exchange_capture_mode(&mode_);
}

}  // namespace raddle::cuda
