// Applies the chosen colours before anything is drawn. Without a choice the system's hold.
(() => {
  const chosen = localStorage.getItem("stagebus-theme");
  if (chosen === "light" || chosen === "dark") {
    document.documentElement.dataset.theme = chosen;
  }
})();
