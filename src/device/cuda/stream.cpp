#include "device/cuda/stream.h"

#include "device/cuda/driver.h"
#include "raddle/error.h"

namespace raddle::cuda {

namespace {

/// CU_STREAM_LEGACY, 1, is what null means here.
bool is_default(StreamHandle stream) {
  return stream == nullptr || stream == reinterpret_cast<StreamHandle>(1);
}
bool is_per_thread(StreamHandle stream) { return stream == reinterpret_cast<StreamHandle>(2); }

}  // namespace

StreamId id_of(StreamHandle stream) {
  if (is_default(stream)) return StreamId{};
  if (!is_per_thread(stream)) return StreamId{stream, 0};
  static std::atomic<u64> threads = 0;
  thread_local const u64 mine = ++threads;
  return StreamId{stream, mine};
}

bool is_capturing(StreamHandle stream) {
  int status = 0;
  const int result = driver().is_capturing(stream, &status);
  if (result == capture_implicit)
    fail<ValueError>(
        "the stream is the default one, while another stream captures a graph that it would wait "
        "for; expected a stream of its own, or a capture on a non-blocking stream");
  return result == 0 && status != 0;
}

void check_takes_work(StreamHandle stream) {
  if (is_default(stream)) is_capturing(stream);
}

bool can_be_marked(StreamHandle stream) {
  int status = 0;
  return driver().is_capturing(stream, &status) == 0 && status == 0;
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

void StreamProgress::mark() {
  if (marked_ == tickets_) return;
  const std::lock_guard lock(mutex_);
  const u64 covered = tickets_;  // taken before the mark, so that their work is before it, too
  if (marked_ == covered) return;
  const OutsideCapture outside;
  if (!can_be_marked(id_.handle)) return;
  if (!event_) event_.emplace();
  event_->record(id_.handle);
  marked_ = covered;
}
bool StreamProgress::delay(StreamHandle later, u64 ticket) const {
  const std::lock_guard lock(mutex_);
  if (marked_ < ticket) return false;
  event_->delay(later);
  return true;
}
bool StreamProgress::has_mark(u64 ticket) const { return marked_ >= ticket; }

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
