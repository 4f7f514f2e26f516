"""The table of slow tests that quick ones cover names tests that exist, where their files were collected."""

from covered import QUICK_FOR, own_name


def test_every_name_is_that_of_a_test(collected: dict[str, bool]) -> None:
    files, names = {name.partition("::")[0] for name in collected}, {*collected, *map(own_name, collected)}
    for slow in QUICK_FOR:
        assert slow in names or slow.partition("::")[0] not in files, f"there is no test {slow}"


def test_what_covers_another_is_quick(collected: dict[str, bool]) -> None:
    """With one of its parameters at least."""
    files = {name.partition("::")[0] for name in collected}
    quick = {own_name(name) for name, slow in collected.items() if not slow}
    for name in QUICK_FOR.values():
        assert name in quick or name.partition("::")[0] not in files, f"{name} is not quick and covers another"
