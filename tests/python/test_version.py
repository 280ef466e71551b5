from importlib.metadata import version

import raddle


def test_library_and_package_agree():
    assert raddle.__version__ == version("raddle")
