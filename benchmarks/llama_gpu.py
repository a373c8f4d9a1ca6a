"""A GPU that computes nothing, for llama.cpp to lay its graphs out over two memories.

It is registered with ggml of a loaded library and says what ggml-cuda says: it can compute every
operation, and takes over those with weights of the host from 32 rows on (ggml-cuda.cu,
ggml_backend_cuda_device_offload_op). Its buffers are the host's. The structures are those of
ggml-backend-impl.h in build b11549, which has two functions of a buffer type more than 0c1e57098.
"""

import ctypes
from math import prod
from typing import Any

_POINTER = ctypes.c_void_p
_F16 = 1  # ggml_type
_API_VERSION, _GPU, _ALIGNMENT, _MEMORY, _LEAST_ROWS = 2, 1, 128, 1 << 40, 32


def _structure(functions: str, *others: tuple[str, Any]) -> type[ctypes.Structure]:
    fields = [*((name, _POINTER) for name in functions.split()), *others]
    return type("Structure", (ctypes.Structure,), {"_fields_": fields})


_BufferType = _structure(
    "get_name alloc_buffer more get_alignment get_max_size get_alloc_size more_yet is_host"
    " device context"
)
_Backend = _structure(
    "guid get_name free set_async get_async set_2d_async get_2d_async copy_async synchronize"
    " plan_create plan_free plan_update plan_compute compute record wait optimize device context"
)
_Device = _structure(
    "get_name get_description get_memory get_type get_props init_backend get_buffer_type"
    " get_host_buffer_type buffer_from_host supports_op supports_buft offload_op event_new"
    " event_free event_synchronize reg context"
)


class _Registry(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int),
        *((name, _POINTER) for name in ("get_name", "count", "device", "address", "context")),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("name", "description")),
        *((name, ctypes.c_size_t) for name in ("free", "total")),
        ("type", ctypes.c_int),
        ("id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 5),
    )


class _Tensor(ctypes.Structure):
    """The beginning of struct ggml_tensor."""


_Tensor._fields_ = (
    ("type", ctypes.c_int),
    ("buffer", _POINTER),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("parameters", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("sources", ctypes.POINTER(_Tensor) * 10),
    ("view_source", _POINTER),
    ("view_offset", ctypes.c_size_t),
)


class Gpu:
    """The GPU; it lives as long as the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._kept: list[Any] = []
        self._name = ctypes.create_string_buffer(b"GPU")
        self._guid = ctypes.create_string_buffer(16)
        self._types, self._device, self._registry = _BufferType(), _Device(), _Registry()
        library.ggml_op_name.restype = ctypes.c_char_p
        library.ggml_backend_cpu_buffer_type.restype = _POINTER
        library.ggml_backend_buft_alloc_buffer.restype = _POINTER
        library.ggml_backend_buft_alloc_buffer.argtypes = [_POINTER, ctypes.c_size_t]
        library.ggml_backend_register.argtypes = [_POINTER]
        library.ggml_nbytes.restype = ctypes.c_size_t
        library.ggml_nbytes.argtypes = [_POINTER]
        self._fill()
        library.ggml_backend_register(ctypes.addressof(self._registry))

    def _fill(self) -> None:
        types, device, registry = map(ctypes.addressof, (self._types, self._device, self._registry))
        name = self._function(_POINTER, 1, lambda _: ctypes.addressof(self._name))
        size, yes = ctypes.c_size_t, ctypes.c_bool
        self._set(
            self._types,
            get_name=name,
            alloc_buffer=self._function(_POINTER, 2, self._allocate),
            get_alignment=self._function(size, 1, lambda _: _ALIGNMENT),
            get_alloc_size=self._function(size, 2, lambda _, tensor: self._size(tensor)),
            device=device,
        )
        self._set(
            self._device,
            get_name=name,
            get_description=name,
            get_memory=self._function(None, 3, self._memory),
            get_type=self._function(ctypes.c_int, 1, lambda _: _GPU),
            get_props=self._function(None, 2, self._properties),
            init_backend=self._function(_POINTER, 2, self._backend),
            get_buffer_type=self._function(_POINTER, 1, lambda _: types),
            supports_op=self._function(yes, 2, lambda *_: True),
            supports_buft=self._function(yes, 2, lambda _, of: of == types),
            offload_op=self._function(yes, 2, lambda _, op: self._takes_over(op)),
            reg=registry,
        )
        self._set(
            self._registry,
            version=_API_VERSION,
            get_name=name,
            count=self._function(size, 1, lambda _: 1),
            device=self._function(_POINTER, 2, lambda *_: device),
            address=self._function(_POINTER, 2, lambda *_: None),
        )

    def _set(self, structure: ctypes.Structure, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(structure, name, value)

    def _function(self, result: Any, arguments: int, body: Any) -> Any:
        made = ctypes.CFUNCTYPE(result, *[_POINTER] * arguments)(body)
        self._kept.append(made)
        return ctypes.cast(made, _POINTER)

    def _allocate(self, types: int, size: int | None) -> int:
        """A buffer of the host under this GPU's name: recurrent states are always allocated."""
        host = self._library.ggml_backend_cpu_buffer_type()
        found: int = self._library.ggml_backend_buft_alloc_buffer(host, (size or 0) + 4096)
        words = ctypes.cast(found, ctypes.POINTER(_POINTER))
        words[next(index for index in range(24) if words[index] == host)] = types
        return found

    def _size(self, place: int) -> int:
        """Flash attention has copies in f16 of caches in other types behind its result.

        Source: ggml-cuda/fattn-common.cuh, ggml_cuda_flash_attn_ext_get_f16_extra_data.
        """
        nbytes: int = self._library.ggml_nbytes(place)
        tensor = ctypes.cast(place, ctypes.POINTER(_Tensor))[0]
        if self._library.ggml_op_name(tensor.op) != b"FLASH_ATTN_EXT":
            return nbytes
        keys, values = (tensor.sources[index].contents for index in (1, 2))
        viewed = [
            (each.view_source or ctypes.addressof(each), each.view_offset)
            for each in (keys, values)
        ]
        for cache in (keys, values) if viewed[0] != viewed[1] else (keys,):
            if cache.type != _F16:
                nbytes += -nbytes % _ALIGNMENT + 2 * prod(cache.ne)
        return nbytes

    def _memory(self, _: int, free: int, total: int) -> None:
        for place in (free, total):
            ctypes.cast(place, ctypes.POINTER(ctypes.c_size_t))[0] = _MEMORY

    def _properties(self, _: int, place: int) -> None:
        found = ctypes.cast(place, ctypes.POINTER(_Properties))[0]
        found.name = found.description = b"GPU"
        found.free = found.total = _MEMORY
        found.type = _GPU

    def _backend(self, device: int, _: int) -> int:
        backend = _Backend()
        self._kept.append(backend)
        self._set(
            backend,
            guid=ctypes.addressof(self._guid),
            get_name=self._device.get_name,
            free=self._function(None, 1, lambda _: None),
            device=device,
        )
        return ctypes.addressof(backend)

    def _takes_over(self, op: int) -> bool:
        tensor = ctypes.cast(op, ctypes.POINTER(_Tensor))[0]
        name, (_, rows, deep, deeper) = self._library.ggml_op_name(tensor.op), tensor.ne
        if name in (b"GET_ROWS", b"MUL_MAT"):
            return bool(name == b"MUL_MAT" and rows >= _LEAST_ROWS)
        if name in (b"MUL_MAT_ID", b"ROPE"):
            return bool(deep >= _LEAST_ROWS)
        return bool(rows * deep * deeper >= _LEAST_ROWS)
