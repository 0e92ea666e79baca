"""Reads ahead in a thread."""

import collections
import threading
import weakref
from collections.abc import Iterator
from typing import Any


class Prefetcher[Element]:
  """Iterator that is up to `depth` elements ahead of its consumer.

  An error in the thread is raised by `next` at the element that it hit. The
  thread ends with the iterable, on `close`, when the object is dropped, or
  before the interpreter exits.
  """

  def __init__(self, elements: Iterator[Element], depth: int = 2):
    # The thread holds the buffer, not the object, which may so be dropped.
    self._buffer = _Buffer(depth)
    thread = threading.Thread(
      target=_fill,
      args=(elements, self._buffer),
      name='prefetch',
      daemon=True,
    )
    self._finalizer = weakref.finalize(self, _stop, self._buffer, thread)
    thread.start()

  def __iter__(self) -> 'Prefetcher[Element]':
    return self

  def __next__(self) -> Element:
    return self._buffer.take()

  def close(self) -> None:
    """Stops the thread and waits for it; `next` is not accepted any more."""
    self._finalizer()


class _Buffer:
  """A bounded queue that can be closed from either end."""

  def __init__(self, depth: int):
    self._depth = depth
    self._items: collections.deque = collections.deque()
    self._changed = threading.Condition()
    self._closed = False
    self._error: BaseException | None = None

  def put(self, item: Any) -> bool:
    """Waits for room; returns whether the consumer still wants more."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._closed or len(self._items) < self._depth
      )
      if self._closed:
        return False
      self._items.append(item)
      self._changed.notify_all()
      return True

  def finish(self, error: BaseException) -> None:
    """Makes `take` raise `error` once the items are gone."""
    with self._changed:
      self._error = error
      self._changed.notify_all()

  def take(self) -> Any:
    with self._changed:
      self._changed.wait_for(
        lambda: self._closed or self._items or self._error is not None
      )
      if self._closed:
        raise ValueError('these batches are closed')
      if self._items:
        self._changed.notify_all()
        return self._items.popleft()
      raise self._error

  def close(self) -> None:
    with self._changed:
      self._closed = True
      self._items.clear()
      self._changed.notify_all()


def _fill(elements: Iterator, buffer: _Buffer) -> None:
  try:
    for element in elements:
      if not buffer.put(element):
        return
  except BaseException as error:  # whatever it is, the consumer must see it
    buffer.finish(error)
  else:
    buffer.finish(StopIteration())


def _stop(buffer: _Buffer, thread: threading.Thread) -> None:
  buffer.close()
  # The garbage collector may run this in any thread.
  if thread is not threading.current_thread():
    thread.join()
