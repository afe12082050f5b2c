"""Weight-name rules that several families share: which of a checkpoint's names goes where."""
