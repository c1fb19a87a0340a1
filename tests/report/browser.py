"""A Chromium for the tests of the report: one process, reports opened from files as a user opens them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZES = {"desktop": (1280, 900), "tablet": (820, 1100), "phone": (375, 812)}


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def axe() -> str:
    """The rules of accessibility that the pages are held to."""
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


@contextmanager
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield running
        finally:
            running.close()


class Opened:
    """A report in a page, with what the console says."""

    def __init__(self, running, path, size="desktop", theme="light"):
        width, height = SIZES[size]
        self.context = running.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"file://{path}")
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()

    def serious(self, within: str = "html") -> list[str]:
        """Faults of accessibility that axe calls serious or critical."""
        self.page.evaluate(f"{axe()}; undefined")
        faults = self.page.evaluate("within => axe.run(within, {resultTypes: ['violations']})", within)["violations"]
        return [
            f"{fault['id']}: {fault['help']}: {'; '.join(node['html'][:160] for node in fault['nodes'][:6])}"
            for fault in faults
            if fault["impact"] in ("serious", "critical")
        ]
