"""MovieLens in plain PyTorch: which films does a user rate 4 or 5?

In this one process:       python examples/movielens_torch.py

`movielens.py` is the same on parameter servers.
"""

import movielens_data as movielens
import torch
import torch.nn.functional as F
from torch import nn


class Ranker(nn.Module):
    """Embeddings of user, film and their features, and a small network that scores them together."""

    def __init__(self, data):
        super().__init__()
        self.user = nn.Embedding(data.size("user"), 16, sparse=True)
        self.item = nn.Embedding(data.size("item"), 16, sparse=True)
        self.age = nn.Embedding(data.size("age"), 16, sparse=True)
        self.gender = nn.Embedding(data.size("gender"), 16, sparse=True)
        self.occupation = nn.Embedding(data.size("occupation"), 16, sparse=True)
        self.genres = nn.EmbeddingBag(data.size("genres"), 16, mode="mean", sparse=True)
        self.tables = [table.weight for table in self.children()]
        for table in self.tables:
            nn.init.normal_(table, std=0.05)
        self.head = nn.Sequential(nn.Linear(6 * 16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        """The logit of each sample of the batch."""
        single = [getattr(self, name)(batch[name]) for name in ("user", "item", "age", "gender", "occupation")]
        x = torch.cat([*single, self.genres(*batch["genres"])], dim=-1)
        return self.head(x).squeeze(-1)


def main():
    """Train, report the held-out AUC of each epoch, save the model and recommend with it."""
    args = movielens.arguments(__doc__)
    data = movielens.load(args.data)
    train, valid = data.split(args.seed)

    torch.manual_seed(args.seed)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, torch does not warn of it
    model = Ranker(data)
    dense, sparse = torch.optim.Adam(model.head.parameters(), lr=1e-3), torch.optim.Adagrad(model.tables, lr=0.1)
    for epoch in range(args.epochs):
        model.train()
        for batch in movielens.batches(train, batch_size=4 * args.batch_size):
            dense.zero_grad()
            sparse.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            dense.step()
            sparse.step()
        model.eval()
        with torch.no_grad():
            scores = torch.cat([model(b) for b in movielens.batches(valid, batch_size=4096, shuffle=False)])
        metrics = {"auc": movielens.auc(scores, torch.from_numpy(valid["label"]))}
        print(f"epoch {epoch}: held-out AUC {metrics['auc']:.4f}")

    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), args.out / "model.pt")
    model = Ranker(data)
    model.load_state_dict(torch.load(args.out / "model.pt", weights_only=True))
    movielens.print_recommendations(model, data)


if __name__ == "__main__":
    main()
