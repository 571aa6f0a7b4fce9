"""What the layout promises: imports point one way, the library stands alone, names are explained.

The sources are read as text or run in processes of their own; behaviour is tested elsewhere.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = sorted((ROOT / "softvq").rglob("*.py"))
README = ROOT / "README.md"
IDS = [str(path.relative_to(ROOT)) for path in LIBRARY]

# Lowest first: a part imports from parts on lower levels, or from its own package
LEVELS = [
    {"streaming", "distributed", "image_files", "metrics", "figures"},
    {"ddcl", "data", "export"},
    {"temperature"},
    {"quantizers"},
    {"autoencoder", "readout"},
    {"hierarchical"},
    {"checkpoint", "evaluation"},
    {"training"},
    {"program"},
    {"loop"},
    {"prior"},
]
# Parts that not every part above may use
USERS = {
    "streaming": {"ddcl", "export"},
    "image_files": {"data"},
    "data": {"evaluation", "training", "program", "prior"},
    "metrics": {"evaluation", "prior"},
    "figures": set(),
}
# The extras `train` and `text`, under the names that are imported
EXTRA = (
    *("torchvision", "torchmetrics", "lpips", "matplotlib", "tqdm", "tyro", "sklearn", "PIL"),
    *("tensorboard", "transformers", "torch_fidelity"),
)


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it; for `from a import b` both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def part(path: Path) -> str:
    """`quantizers` for softvq/quantizers/ema.py, `data` for softvq/data.py."""
    return path.relative_to(ROOT / "softvq").with_suffix("").parts[0]


def parts_used(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in imported(path) if name.startswith("softvq.")}
    modules = {part(module) for module in LIBRARY}
    return names & modules - {"__init__"}


@pytest.mark.parametrize("path", LIBRARY, ids=IDS)
def test_the_library_imports_no_program(path):
    tops = {name.split(".")[0] for name in imported(path)}
    assert not tops & {"models", "eval", "tests", "train_vqvae"}


@pytest.mark.parametrize("path", LIBRARY, ids=IDS)
def test_imports_inside_the_library_point_one_way(path):
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    if path == ROOT / "softvq" / "__init__.py":
        return
    assert part(path) in level, "a new module needs its place in LEVELS"
    for used in parts_used(path) - {part(path)}:
        assert level[used] < level[part(path)]
        assert part(path) in USERS.get(used, level), f"{path} needs {used}"


@pytest.mark.parametrize("name", sorted(LEVELS[0]))
def test_the_lowest_parts_stand_alone(name):
    path = ROOT / "softvq" / f"{name}.py"
    assert not parts_used(path)
    assert "softvq" not in {module.split(".")[0] for module in imported(path)}


def test_programs_and_models_are_imported_only_where_the_layout_says():
    for path in sorted((ROOT / "models").glob("*.py")):
        tops = {name.split(".")[0] for name in imported(path)}
        assert tops <= {"softvq", "models"}, path
    for path in sorted((ROOT / "eval").glob("*.py")):
        assert "tests" not in {name.split(".")[0] for name in imported(path)}
    assert "eval" not in {name.split(".")[0] for name in imported(ROOT / "train_vqvae.py")}


def test_only_the_figures_import_matplotlib():
    users = {
        path.name
        for path in [*LIBRARY, *ROOT.glob("*.py"), *ROOT.glob("eval/*.py"), *ROOT.glob("models/*")]
        if path.suffix == ".py" and any(name.startswith("matplotlib") for name in imported(path))
    }
    assert users == {"figures.py"}


def test_the_package_module_holds_re_exports_alone():
    body = ast.parse((ROOT / "softvq" / "__init__.py").read_text()).body
    assert isinstance(body[0], ast.Expr)  # the docstring
    for node in body[1:]:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in node.names)


def test_models_are_configurations_alone():
    for path in sorted((ROOT / "models").glob("*.py")):
        kinds = {type(node) for node in ast.parse(path.read_text()).body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign, ast.AnnAssign}, path


def test_the_library_works_without_the_extra_of_the_programs(python):
    code = f"""
import sys

sys.modules |= dict.fromkeys({EXTRA!r})  # an entry of None makes an import fail
import tempfile, torch, softvq
config = softvq.VQVAEConfig(quantizer=softvq.DDCLConfig(dim=4, codebook_size=8), hidden=8)
with tempfile.TemporaryDirectory() as folder:
    softvq.save_model(folder, softvq.VQVAE(config))
    model = softvq.load(folder)
output = model(torch.zeros(1, 3, 8, 8))
codebook = softvq.DDCLCodebook(dim=4, codebook_size=8)
quantized, indices, loss = codebook(torch.randn(2, 5, 4))
print(tuple(output.reconstruction.shape), tuple(indices.shape))
"""
    out, _ = python("-c", code)
    assert out == "(1, 3, 8, 8) (2, 5)\n"


@pytest.mark.parametrize("path", LIBRARY, ids=IDS)
def test_every_public_name_is_explained(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), path
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name}"


def test_programs_and_models_are_explained():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("eval/*.py"), *ROOT.glob("models/*.py")]:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def calls(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def test_only_the_programs_end_is_printed_by_the_library():
    printing = {path.name for path in LIBRARY if "print" in calls(path)}
    assert printing == {"program.py"}


def test_nothing_is_pickled_executed_or_loaded_without_its_guard():
    for path in [*LIBRARY, *ROOT.glob("*.py"), *ROOT.glob("eval/*.py")]:
        assert "pickle" not in imported(path)
        assert not calls(path) & {"eval", "exec", "compile"}, path
        for call in re.findall(r"torch\.load\([^\n]*", path.read_text()):
            assert "weights_only=True" in call, path
        assert "torch.save(" not in path.read_text()


def python_blocks() -> list[str]:
    text = README.read_text() if README.exists() else ""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_readmes_python_runs_from_top_to_bottom(python, tmp_path):
    blocks = python_blocks()
    if not blocks:
        pytest.skip("the README shows no Python")
    (tmp_path / "assets").symlink_to(ROOT / "assets")  # what it writes stays out of the checkout
    python("-c", "\n".join(blocks), folder=tmp_path, PYTHONPATH=str(ROOT))


TESTS = sorted((ROOT / "tests").glob("*.py"))
# What raises if something is wrong
CHECKS = ("assert", "raises", "warns", "opcheck")


def asserting(tree: ast.Module, shared: set[str]) -> set[str]:
    """Functions of a module that assert, by themselves or through others of it or of `shared`."""
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    found = set(shared)
    for name, function in functions.items():
        for node in ast.walk(function):
            called = node.func if isinstance(node, ast.Call) else None
            called_name = getattr(called, "attr", getattr(called, "id", ""))
            if isinstance(node, ast.Assert) or called_name.startswith(CHECKS):
                found.add(name)
    while True:
        users = {
            name
            for name, function in functions.items()
            if found & {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            or found & {argument.arg for argument in function.args.args}
        }
        if users <= found:
            return found
        found |= users


@pytest.mark.parametrize("path", TESTS, ids=[path.name for path in TESTS])
def test_every_test_asserts_something(path):
    shared = asserting(ast.parse((ROOT / "tests" / "conftest.py").read_text()), set())
    tree = ast.parse(path.read_text())
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    assert {name for name in names if name.startswith("test_")} <= asserting(tree, shared)
