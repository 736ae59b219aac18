import subprocess
import sys


def test_warming_the_kernels_loads_every_one_and_no_torch():
    script = (
        "import pkgutil, sys; import evergrad.kernels as k; from evergrad.kernels import warm; warm.warm();"
        "missing = {m.name for m in pkgutil.iter_modules(k.__path__)} - {n.split('.')[-1] for n in sys.modules};"
        "assert not missing, missing; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
