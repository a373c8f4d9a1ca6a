"""llama.cpp with its settings."""

from msgspec.structs import replace

from memfit.estimators.base.errors import InputError
from memfit.estimators.runtimes.llama_cpp.caches import CACHE_TYPES, CacheTypes
from memfit.estimators.runtimes.runtime import Runtime


class LlamaCppRuntime(Runtime, frozen=True, kw_only=True):
    """llama.cpp with its settings."""

    types: CacheTypes | None = None
    """The types of the cache; None where the workload's KV bits decide."""
    flash: bool = True
    """Whether attention may be fused (``--flash-attn``)."""

    def with_setting(self, option: str, text: str) -> Runtime:
        """Return llama.cpp with a setting.

        Raises:
            InputError: when it has no such setting, or the text cannot be read.
        """
        match option:
            case "--cache-type":
                return replace(self, types=parse_cache_types(text))
            case "--no-flash-attn":
                return replace(self, flash=False)
            case _:
                return Runtime.with_setting(self, option, text)


def parse_cache_types(text: str) -> CacheTypes:
    """Return the types of a text such as ``q8_0`` or ``q8_0,f16``: of keys, and of values.

    Raises:
        InputError: when llama.cpp keeps no cache in such a type.
    """
    names = [name.strip().lower() for name in text.split(",")]
    if len(names) > 2 or not all(name in CACHE_TYPES for name in names):
        raise InputError(
            f"{text[:60]!r}: llama.cpp keeps a cache in {', '.join(CACHE_TYPES)}; give one, or one"
            " for keys and one for values"
        )
    return CacheTypes(names[0], names[-1])
