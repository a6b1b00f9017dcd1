"""Our declarations are those of UCX's own headers."""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from kvpool.transport.ucx import api

C_NAMES: Final = {
    api.ContextParams: "ucp_params_t",
    api.WorkerParams: "ucp_worker_params_t",
    api.EndpointParams: "ucp_ep_params_t",
    api.ErrorHandler: "ucp_err_handler_t",
    api.MemMapParams: "ucp_mem_map_params_t",
    api.RequestParam: "ucp_request_param_t",
    api.EndpointAttr: "ucp_ep_attr_t",
    api.Transports: "ucp_transports_t",
    api.TransportEntry: "ucp_transport_entry_t",
}
RENAMED: Final = {"callback": "cb"}
CONSTANTS: Final = {
    "UCP_FEATURE_RMA": api.FEATURE_RMA,
    "UCP_FEATURE_WAKEUP": api.FEATURE_WAKEUP,
    "UCS_THREAD_MODE_SERIALIZED": api.THREAD_MODE_SERIALIZED,
    "UCP_ERR_HANDLING_MODE_PEER": api.ERR_HANDLING_PEER,
    "UCS_MEMORY_TYPE_HOST": api.MEMORY_TYPE_HOST,
    "UCP_EP_CLOSE_FLAG_FORCE": api.EP_CLOSE_FORCE,
    "UCS_OK": api.OK,
    "UCS_INPROGRESS": api.IN_PROGRESS,
    "UCS_ERR_BUSY": api.ERR_BUSY,
    "UCS_ERR_LAST": api.ERR_LAST,
    "UCP_PARAM_FIELD_FEATURES": api.PARAM_FEATURES,
    "UCP_PARAM_FIELD_NAME": api.PARAM_NAME,
    "UCP_WORKER_PARAM_FIELD_THREAD_MODE": api.WORKER_PARAM_THREAD_MODE,
    "UCP_EP_PARAM_FIELD_REMOTE_ADDRESS": api.EP_PARAM_REMOTE_ADDRESS,
    "UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE": api.EP_PARAM_ERR_HANDLING_MODE,
    "UCP_EP_PARAM_FIELD_ERR_HANDLER": api.EP_PARAM_ERR_HANDLER,
    "UCP_EP_ATTR_FIELD_TRANSPORTS": api.EP_ATTR_TRANSPORTS,
    "UCP_MEM_MAP_PARAM_FIELD_ADDRESS": api.MEM_MAP_ADDRESS,
    "UCP_MEM_MAP_PARAM_FIELD_LENGTH": api.MEM_MAP_LENGTH,
    "UCP_OP_ATTR_FIELD_FLAGS": api.OP_FLAGS,
    "UCP_OP_ATTR_FIELD_MEMORY_TYPE": api.OP_MEMORY_TYPE,
}


@pytest.fixture(scope="module")
def headers() -> Path:
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations or shutil.which("cc") is None:
        pytest.skip("needs the libucx wheel and a C compiler")
    return Path(spec.submodule_search_locations[0]) / "include"


def measure(expressions: list[str], headers: Path, folder: Path) -> list[int]:
    """The values of C expressions, by the compiler."""
    lines = "".join(f'printf("%lld\\n", (long long)({expression}));\n' for expression in expressions)
    source = folder / "measure.c"
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\nint main(void) {{\n{lines}return 0;\n}}\n")
    subprocess.run(["cc", "-I", str(headers), "-o", str(folder / "measure"), str(source)], check=True, capture_output=True, timeout=60)
    ran = subprocess.run([str(folder / "measure")], check=True, capture_output=True, text=True, timeout=60)
    return [int(line) for line in ran.stdout.split()]


def test_structures_lie_in_memory_as_the_headers_say(headers: Path, tmp_path: Path) -> None:
    """One wrong offset and UCX reads a pointer from the wrong place."""
    fields = [(kind, field[0]) for kind in C_NAMES for field in kind._fields_ if field[0] != "padding"]
    expressions = [f"offsetof({C_NAMES[kind]}, {RENAMED.get(name, name)})" for kind, name in fields]
    expressions += [f"sizeof((({C_NAMES[kind]} *)0)->{RENAMED.get(name, name)})" for kind, name in fields]
    ours = [getattr(kind, name).offset for kind, name in fields] + [getattr(kind, name).size for kind, name in fields]
    assert measure(expressions, headers, tmp_path) == ours


def test_structures_are_at_least_as_long_as_ucx_reads(headers: Path, tmp_path: Path) -> None:
    """The padding stands for the fields we leave out."""
    sizes = measure([f"sizeof({name})" for name in C_NAMES.values()], headers, tmp_path)
    assert all(ctypes.sizeof(kind) >= size for kind, size in zip(C_NAMES, sizes, strict=True))


def test_constants_and_status_width_are_those_of_the_headers(headers: Path, tmp_path: Path) -> None:
    """Enumerations are numbers to ctypes; ucs_status_t is one byte."""
    values = measure([*CONSTANTS, "sizeof(ucs_status_t)"], headers, tmp_path)
    assert values == [*CONSTANTS.values(), ctypes.sizeof(ctypes.c_int8)]


@pytest.mark.parametrize(
    ("pointer", "status"), [(None, 0), (0, 0), (2**64 - 25, -25), (2**64 - 100, -100), (2**64 - 101, 1), (0x7F00_0000_1000, 1)]
)
def test_pointer_status_tells_done_error_and_request_apart(pointer: int | None, status: int) -> None:
    """A returned pointer is null, an error number in disguise, or a request to wait for."""
    assert api.pointer_status(pointer) == status


def test_status_text_names_the_usual_and_numbers_all() -> None:
    """An operator searches for the words; a developer for the number."""
    assert api.status_text(-25) == "connection reset by remote peer (-25)"
    assert "(-99)" in api.status_text(-99)
