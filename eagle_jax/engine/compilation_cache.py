"""Compiled programs are kept on disk, so that the next process need not compile them."""

from pathlib import Path


def keep_compiled_programs(folder: Path | None = None) -> Path:
    """Makes JAX keep compiled programs in a folder, unless the user has chosen one ($JAX_COMPILATION_CACHE_DIR or `jax.config`).

    It is a setting of the whole process. $JAX_ENABLE_COMPILATION_CACHE=false switches the cache off.

    Args:
      folder: None is "compiled" in the cache directory of this library.

    Returns:
      The folder that is used.
    """
    import jax  # here, so that the command line starts without it

    from eagle_jax.loading.demo_target import cache_folder

    if chosen := jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return Path(chosen)
    folder = cache_folder() / "compiled" if folder is None else folder
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs count too: on a fast machine each of a dozen takes less than JAX's threshold of a second.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
