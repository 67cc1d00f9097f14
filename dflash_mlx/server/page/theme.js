// Runs before the page is drawn, so that it never flashes in the wrong colours.
(() => {
  try {
    const theme = localStorage.getItem("dflash-mlx/theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // A browser that keeps nothing follows the system.
  }
})();
