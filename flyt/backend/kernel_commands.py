# SPDX-License-Identifier: Apache-2.0
"""What a session does with code: images, modules, functions, launches, compilation.

A launch is put on its stream at once. All else may wait in the driver for work of the whole
context, or compile for seconds, so it is done on a thread of its own (`flyt.backend.apart`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flyt.backend import compiling, images
from flyt.backend.blocks import Block
from flyt.backend.devices.kernels import Shape
from flyt.backend.memory_commands import Stall
from flyt.backend.modules import Module
from flyt.backend.prints import may_print
from flyt.errors import DeviceError, ProtocolError
from flyt.rpc import messages as m
from flyt.rpc.kernel_commands import Compiled

if TYPE_CHECKING:
    from flyt.backend.session import Session

LAUNCHES = 512
"""Answers a session may be owed when it launches: below the driver's queue of about a thousand
launches, since a launch into a full queue blocks every thread of the context."""


def image_part(session: Session, command: m.ImagePart, payload: list[bytes]) -> None:
    if len(payload) != 1 or len(payload[0]) > m.INLINE_CHUNK:
        raise ProtocolError(f"an IMAGE_PART wants one payload of at most {m.INLINE_CHUNK} bytes")
    modules = session.holdings.modules
    modules.take_part(command.image, command.offset, command.total, payload[0])
    session.answer(command.id)


def _apart(
    session: Session, number: int, work: Callable[[], Any], then: Callable[[Any], None]
) -> None:
    """Do ``work`` on a thread of its own, then ``then`` with its result on the session's."""
    if session.holdings.apart.is_busy:
        raise Stall

    def told(result: Any) -> None:
        if isinstance(result, DeviceError):
            session.fail(number, result)
        else:
            then(result)

    session.holdings.apart.do(work, told)


def _image(session: Session, number: int, digest: bytes) -> bytes | None:
    """An image of the worker's store; None when the client has been told to send it."""
    image = session.services.images.get(digest)
    if image is None:
        session.answer(number, m.Status.UNKNOWN_IMAGE, text="the worker does not have this image")
    return image


def module_load(session: Session, command: m.ModuleLoad, _: list[bytes]) -> None:
    device = session.holdings.streams.device(command.device)
    device.kernels.architecture()  # first, so that a device without kernels says so
    image = _image(session, command.id, command.image)
    if image is None:
        return
    modules = session.holdings.modules
    modules.check_room(command.module, len(image))

    prints = session.services.prints is not None and may_print(image)

    def loaded(handle: Any) -> None:
        modules.add(command.module, Module(device, handle, len(image)))
        modules.may_print = modules.may_print or prints
        session.answer(command.id, 0, [1] if prints else ())

    _apart(session, command.id, lambda: device.kernels.load(images.checked(image)), loaded)


def module_unload(session: Session, command: m.ModuleUnload, _: list[bytes]) -> None:
    if session.holdings.apart.is_busy:
        raise Stall
    holdings = session.holdings
    module = holdings.modules.remove(command.module)
    for block in module.lent:
        holdings.blocks.remove(block)

    def done(_: int) -> None:
        # A failure of the work is told to whom it belongs; the module goes all the same.
        holdings.apart.do(lambda: module.device.kernels.unload(module.handle), told)

    def told(result: Any) -> None:
        if isinstance(result, DeviceError):
            session.fail(command.id, result)
        else:
            session.answer(command.id)

    holdings.when_done(holdings.streams.of(module.device), done)


def function_get(session: Session, command: m.FunctionGet, _: list[bytes]) -> None:
    modules = session.holdings.modules
    module = modules.module(command.module)
    modules.check_function(command.function)
    kernels = module.device.kernels

    def look_up() -> Any:
        handle = kernels.function(module.handle, command.name)
        return handle, kernels.facts(handle)

    def found(result: Any) -> None:
        handle, facts = result
        modules.add_function(command.function, module, handle, facts)
        session.answer(command.id, payload=facts.pack())

    _apart(session, command.id, look_up, found)


def function_set(session: Session, command: m.FunctionSet, _: list[bytes]) -> None:
    function = session.holdings.modules.function(command.function)
    kernels = function.module.device.kernels
    value = command.value - (1 << 32) if command.value >> 31 else command.value

    def change() -> Any:
        kernels.set_attribute(function.handle, command.attribute, value)
        return kernels.facts(function.handle)

    def changed(facts: Any) -> None:
        session.answer(command.id, payload=facts.pack())

    _apart(session, command.id, change, changed)


def global_get(session: Session, command: m.GlobalGet, _: list[bytes]) -> None:
    module = session.holdings.modules.module(command.module)

    def found(result: Any) -> None:
        address, size = result
        block = Block(address, size, module.device, lent=True)
        if all(block.address != one.address for one in module.lent):
            module.lent.append(block)
            session.holdings.blocks.add(block)
        session.answer(command.id, 0, result)

    kernels = module.device.kernels
    _apart(session, command.id, lambda: kernels.variable(module.handle, command.name), found)


def occupancy(session: Session, command: m.Occupancy, _: list[bytes]) -> None:
    function = session.holdings.modules.function(command.function)
    if command.block >> 31:
        raise DeviceError(1, f"a block of {command.block} threads")
    kernels = function.module.device.kernels
    blocks = kernels.occupancy(function.handle, command.block, command.shared, command.flags)
    session.answer(command.id, 0, [blocks])


def launch(session: Session, command: m.Launch, _: list[bytes]) -> None:
    holdings = session.holdings
    if holdings.waiting >= LAUNCHES:
        raise Stall
    modules, streams = holdings.modules, holdings.streams
    function = modules.function(command.function)
    stream = streams.get(command.stream)
    if stream.device is not function.module.device:
        raise DeviceError(400, "the stream belongs to another device than the function")
    if len(command.params) != function.params.size:
        raise DeviceError(
            1,
            f"{len(command.params)} bytes of parameters for a kernel that takes "
            f"{function.params.size}",
        )
    if len(command.attributes) % 4:
        raise ProtocolError("a launch attribute is four numbers")
    # A row of launches shares a mark; other brief work must not wait for a kernel.
    if holdings.unmarked(stream) != modules.launches(stream):
        holdings.mark_before(stream)
    holdings.wait_for_birth(stream)  # nobody knows which memory it uses
    function.params.fill(command.params)
    shape = Shape(
        (command.grid_x, command.grid_y, command.grid_z),
        (command.block_x, command.block_y, command.block_z),
        command.shared,
        _attributes(command.attributes),
    )
    handle = streams.use(stream)
    if modules.may_print and session.services.prints is not None:
        session.services.prints.bound()
    stream.device.kernels.launch(function.handle, shape, handle, function.params.address)
    if command.now:
        session.answer(command.id)
        return
    session.complete(command.id, [stream], brief=True)
    modules.was_launched(stream, holdings.unmarked(stream))
    if session.plain is not None and not modules.may_print:  # what it prints is taken in Python
        session.plain.note_launch(command.stream, stream, command.function, function)


def reach(session: Session, command: m.Reach, _: list[bytes]) -> None:
    session.complete(command.id, [session.holdings.streams.get(command.stream)])


def printed(session: Session, command: m.Printed, _: list[bytes]) -> None:
    prints, streams = session.services.prints, session.holdings.streams
    device = streams.device(command.device)
    if prints is None:
        session.answer(command.id)
        return
    own, event = streams.own(device), device.create_event()

    def reached(code: int) -> None:
        if code:
            session.fail(command.id, DeviceError(code, "work before the text of kernels"))
            return
        try:
            device.kernels.flush(event)
            device.destroy_event(event)
            session.answer(command.id, payload=prints.take() or None)
        except DeviceError as exc:
            session.fail(command.id, exc)

    device.record(event, own.handle)
    session.holdings.when_done([own], reached)


def _attributes(flat: tuple[int, ...]) -> tuple[tuple[int, tuple[int, int, int]], ...]:
    quads = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    return tuple((kind, (x, y, z)) for kind, x, y, z in quads)


def compile_source(session: Session, command: m.Compile, _: list[bytes]) -> None:
    device = session.holdings.streams.device(command.device)
    architecture = device.kernels.architecture()
    source = _image(session, command.id, command.image)
    if source is None:
        return
    request = compiling.checked(command.request, architecture)
    store = session.services.images
    key = hashlib.sha256(command.image + request.key()).digest()

    def work() -> bytes:
        known = store.get(key)
        if known is not None and store.get(Compiled.unpack(known).image) is not None:
            return known
        cubin, names, log = compiling.compiled(source, request)
        result = Compiled(store.put(cubin) if cubin else b"", names, log).pack()
        if cubin:
            store.keep(key, result)
        return result

    def done(result: Any) -> None:
        session.answer(command.id, payload=result)

    _apart(session, command.id, work, done)


HANDLERS: dict[type, Callable[[Any, Any, list[bytes]], None]] = {
    m.ImagePart: image_part,
    m.ModuleLoad: module_load,
    m.ModuleUnload: module_unload,
    m.FunctionGet: function_get,
    m.FunctionSet: function_set,
    m.GlobalGet: global_get,
    m.Occupancy: occupancy,
    m.Launch: launch,
    m.Compile: compile_source,
    m.Reach: reach,
    m.Printed: printed,
}
