// SPDX-License-Identifier: Apache-2.0

//! The concurrent radix tree of dynamo-kv-router under kvbench's load.
//!
//! `dynbench KIND name=value ...` runs one trial and prints its result as JSON. Kinds,
//! arguments, load and result are those of `kvbench trial` (../trial.go).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dynamo_kv_router::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::*;
use serde_json::{Value, json};

const PODS: usize = 40;
const HOT_PREFIXES: usize = 8;
const EVENT_BLOCKS: usize = 16;
const FILLER_BLOCKS: usize = 256;
/// Events of fresh blocks that a pod keeps before it reports the oldest as removed.
const KEPT_EVENTS: usize = 64;
const EVENT_THREADS: usize = 4; // the crate's default

fn mix(n: u64) -> u64 {
    let mut n = n.wrapping_add(0x9E3779B97F4A7C15);
    n = (n ^ n >> 30).wrapping_mul(0xBF58476D1CE4E5B9);
    n = (n ^ n >> 27).wrapping_mul(0x94D049BB133111EB);
    n ^ n >> 31
}

static EVENTS: AtomicU64 = AtomicU64::new(0);

fn event(pod: usize, data: KvCacheEventData) -> RouterEvent {
    let event_id = EVENTS.fetch_add(1, Ordering::Relaxed);
    RouterEvent::new(
        pod as u64,
        KvCacheEvent {
            event_id,
            data,
            dp_rank: 0,
        },
    )
}

/// Blocks of a prompt: the hash of each, and of each with all before it.
#[derive(Clone)]
struct Chain {
    local: Vec<LocalBlockHash>,
    sequence: Vec<u64>,
}

impl Chain {
    fn new(first: u64, blocks: usize) -> Self {
        Self::of(
            (0..blocks as u64)
                .map(|i| LocalBlockHash(mix(first + i)))
                .collect(),
        )
    }

    fn of(local: Vec<LocalBlockHash>) -> Self {
        let sequence = compute_seq_hash_for_block(&local);
        Chain { local, sequence }
    }

    fn stored(&self, pod: usize, from: usize, to: usize) -> RouterEvent {
        let blocks = (from..to)
            .map(|i| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(self.sequence[i]),
                tokens_hash: self.local[i],
                mm_extra_info: None,
            })
            .collect();
        let parent_hash = (from > 0).then(|| ExternalSequenceBlockHash(self.sequence[from - 1]));
        event(
            pod,
            KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash,
                start_position: None,
                blocks,
            }),
        )
    }

    fn removed(&self, pod: usize) -> RouterEvent {
        let block_hashes = self
            .sequence
            .iter()
            .map(|&h| ExternalSequenceBlockHash(h))
            .collect();
        event(
            pod,
            KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }),
        )
    }
}

#[derive(Clone)]
struct Index(Arc<ThreadPoolIndexer<ConcurrentRadixTreeCompressed>>);

impl Index {
    fn new() -> Self {
        let tree = ConcurrentRadixTreeCompressed::new();
        Index(Arc::new(ThreadPoolIndexer::new(tree, EVENT_THREADS, 16)))
    }

    async fn apply(&self, event: RouterEvent) {
        self.0.apply_event(event).await
    }

    /// Waits until all events have arrived in the tree.
    async fn flush(&self) {
        self.0.flush_and_wait().await.unwrap();
    }

    /// The interface as a router uses it.
    async fn ask(&self, prompt: Vec<LocalBlockHash>) -> OverlapScores {
        self.0.find_matches(prompt).await.unwrap()
    }

    /// The tree itself, on the caller's thread.
    fn direct(&self, prompt: &[LocalBlockHash]) -> OverlapScores {
        self.0.backend().find_matches(prompt, false)
    }
}

struct Arguments(HashMap<String, usize>);

impl Arguments {
    fn get(&self, name: &str, default: usize) -> usize {
        self.0.get(name).copied().unwrap_or(default)
    }
}

/// The prefixes that everybody asks for, and who holds how much of each.
struct HotSet {
    prefixes: Vec<Chain>,
    holders: usize,
    depths: bool,
    fork: usize,
    next: u64,
}

impl HotSet {
    fn new(a: &Arguments) -> Self {
        let blocks = a.get("blocks", 263);
        HotSet {
            prefixes: (0..HOT_PREFIXES)
                .map(|i| Chain::new((i * blocks) as u64, blocks))
                .collect(),
            holders: a.get("holders", 10),
            depths: a.get("depths", 0) == 1,
            fork: a.get("fork", 0),
            next: (HOT_PREFIXES * blocks) as u64,
        }
    }

    fn blocks(&self) -> usize {
        self.prefixes[0].local.len()
    }

    fn prefix(&self, n: usize) -> &Chain {
        &self.prefixes[n % HOT_PREFIXES]
    }

    fn holder(&self, prefix: usize, n: usize) -> usize {
        (prefix * PODS / HOT_PREFIXES + n) % PODS
    }

    fn depth(&self, n: usize) -> usize {
        if self.depths {
            self.blocks() * (n + 1) / self.holders
        } else {
            self.blocks()
        }
    }

    fn held_by(&self, pod: usize) -> Vec<usize> {
        let holds = |&i: &usize| (0..self.holders).any(|n| self.holder(i, n) == pod);
        (0..HOT_PREFIXES).filter(holds).collect()
    }

    async fn fill(&mut self, index: &Index, filler: usize) {
        for added in (0..filler).step_by(FILLER_BLOCKS) {
            let pod = added / FILLER_BLOCKS % PODS;
            index
                .apply(Chain::new(self.next, FILLER_BLOCKS).stored(pod, 0, FILLER_BLOCKS))
                .await;
            self.next += FILLER_BLOCKS as u64;
        }
        for (i, prefix) in self.prefixes.iter().enumerate() {
            for n in (0..self.holders).rev() {
                index
                    .apply(prefix.stored(self.holder(i, n), 0, self.depth(n)))
                    .await;
            }
        }
        index.flush().await;
        for (i, prefix) in self.prefixes.iter().enumerate() {
            self.branch(index, i, prefix).await;
        }
        index.flush().await;
    }

    /// Adds another block beside every fork-th, as prompts that part there leave.
    async fn branch(&self, index: &Index, i: usize, prefix: &Chain) {
        if self.fork == 0 {
            return;
        }
        for (k, at) in (self.fork..prefix.local.len())
            .step_by(self.fork)
            .enumerate()
        {
            let mut local = prefix.local[..=at].to_vec();
            local[at] = LocalBlockHash(mix(1 << 62 | (i * 4096 + k) as u64));
            let pod = self.holder(i, self.holders - 1);
            index.apply(Chain::of(local).stored(pod, at, at + 1)).await;
        }
    }

    /// Whether an answer is what was stored: a part of the pods differ in depth only.
    fn right(&self, scores: &OverlapScores) -> bool {
        scores.scores.len() == self.holders
            && (self.depths || scores.scores.values().all(|&n| n as usize == self.blocks()))
    }
}

fn answer(scores: &OverlapScores) -> String {
    let mut pods: Vec<_> = scores
        .scores
        .iter()
        .map(|(w, n)| (w.worker_id, *n))
        .collect();
    pods.sort();
    pods.iter()
        .map(|(pod, n)| format!("{pod}:{n}"))
        .collect::<Vec<_>>()
        .join(" ")
}

fn nanoseconds(from: Instant, to: Instant) -> u64 {
    to.saturating_duration_since(from).as_nanos() as u64
}

fn quantiles(mut ns: Vec<u64>) -> Value {
    ns.sort_unstable();
    let at = |share: f64| ns[((ns.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    json!({"n": ns.len(), "p50_us": at(0.5), "p99_us": at(0.99), "max_us": at(1.0)})
}

fn rss() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm
        .split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 4096
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(1);
        ((mix(self.0) as u128 * n as u128) >> 64) as usize
    }
}

/// One task for each pod that sends its events, each at its time.
struct Writers {
    stop: Arc<AtomicBool>,
    late: Arc<Mutex<Vec<u64>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    begin: Instant,
}

impl Writers {
    async fn start(index: &Index, hot: &Arc<HotSet>, events_per_s: usize) -> Self {
        let mut kept = vec![];
        for pod in 0..PODS {
            let mut events = VecDeque::new();
            for n in 0..KEPT_EVENTS {
                let first = hot.next + ((pod as u64 + 100) << 40) + (n * EVENT_BLOCKS) as u64;
                let chain = Chain::new(first, EVENT_BLOCKS);
                index.apply(chain.stored(pod, 0, EVENT_BLOCKS)).await;
                events.push_back(chain);
            }
            kept.push(events);
        }
        index.flush().await;
        let begin = Instant::now();
        let mut writers = Writers {
            stop: Default::default(),
            late: Default::default(),
            tasks: vec![],
            begin,
        };
        let interval = Duration::from_secs_f64(PODS as f64 / events_per_s as f64);
        for (pod, kept) in kept.into_iter().enumerate() {
            let (index, hot) = (index.clone(), hot.clone());
            let (stop, late) = (writers.stop.clone(), writers.late.clone());
            let first = begin + interval * pod as u32 / PODS as u32;
            writers.tasks.push(tokio::spawn(async move {
                write(index, hot, pod, kept, first, interval, &stop, &late).await
            }));
        }
        writers
    }

    async fn stop(self) -> Value {
        self.stop.store(true, Ordering::Relaxed);
        let elapsed = self.begin.elapsed().as_secs_f64();
        for task in self.tasks {
            task.await.unwrap();
        }
        let late = std::mem::take(&mut *self.late.lock().unwrap());
        json!({"per_s": late.len() as f64 / elapsed, "late": quantiles(late)})
    }
}

#[allow(clippy::too_many_arguments)]
async fn write(
    index: Index,
    hot: Arc<HotSet>,
    pod: usize,
    mut kept: VecDeque<Chain>,
    mut intended: Instant,
    interval: Duration,
    stop: &AtomicBool,
    late: &Mutex<Vec<u64>>,
) {
    let held = hot.held_by(pod);
    let mut random = Random((pod as u64) << 32);
    let mut next = hot.next + ((pod as u64 + 1) << 40);
    loop {
        tokio::time::sleep_until(intended.into()).await;
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let lateness = nanoseconds(intended, Instant::now());
        if !held.is_empty() && random.below(2) == 0 {
            let prefix = &hot.prefixes[held[random.below(held.len())]];
            let at = random.below(prefix.local.len() - EVENT_BLOCKS + 1);
            index.apply(prefix.stored(pod, at, at + EVENT_BLOCKS)).await;
        } else {
            let chain = Chain::new(next, EVENT_BLOCKS);
            next += EVENT_BLOCKS as u64;
            index.apply(chain.stored(pod, 0, EVENT_BLOCKS)).await;
            kept.push_back(chain);
            index.apply(kept.pop_front().unwrap().removed(pod)).await;
        }
        late.lock().unwrap().push(lateness);
        intended += interval;
    }
}

/// Threads that ask in a loop, and nobody else: first by the batch, then one by one.
async fn lookup(a: Arguments) -> Value {
    let mut hot = HotSet::new(&a);
    let index = Index::new();
    hot.fill(&index, a.get("filler", 200_000)).await;
    let hot = Arc::new(hot);
    let mut answers = vec![];
    for n in 0..HOT_PREFIXES {
        answers.push(answer(&index.ask(hot.prefix(n).local.clone()).await));
    }
    let (batches, singles) = (a.get("batches", 5_000), a.get("singles", 30_000));
    let threads = a.get("threads", 1);
    let begin = Instant::now();
    let readers: Vec<_> = (0..threads)
        .map(|t| {
            let (index, hot) = (index.clone(), hot.clone());
            std::thread::spawn(move || {
                let (mut each, mut wrong) = (vec![], 0);
                for _ in 0..batches {
                    for i in 0..64 {
                        let scores = index.direct(&hot.prefix(i + t).local);
                        wrong += (scores.scores.len() != hot.holders) as u64;
                    }
                }
                let looped = begin.elapsed().as_secs_f64();
                for i in 0..singles {
                    let from = Instant::now();
                    let scores = index.direct(&hot.prefix(i + t).local);
                    each.push(nanoseconds(from, Instant::now()));
                    wrong += !hot.right(&scores) as u64;
                }
                (looped, each, wrong)
            })
        })
        .collect();
    let (mut rate, mut each, mut wrong) = (0.0, vec![], 0);
    for reader in readers {
        let result = reader.join().unwrap();
        rate += (64 * batches) as f64 / result.0;
        each.extend(result.1);
        wrong += result.2;
    }
    json!({"lookups_per_s": rate, "latency": quantiles(each), "wrong": wrong, "answers": answers})
}

/// Readers that are released at one moment, again and again, beside writers.
async fn burst(a: Arguments) -> Value {
    let (readers, bursts) = (a.get("readers", 64), a.get("bursts", 8));
    let period = Duration::from_millis(a.get("period_ms", 250) as u64);
    let mut hot = HotSet::new(&a);
    let index = Index::new();
    hot.fill(&index, a.get("filler", 150_000)).await;
    let hot = Arc::new(hot);
    let writers = Writers::start(&index, &hot, a.get("events", 2000)).await;
    let mut running = vec![];
    let mut released = vec![];
    for n in 0..bursts {
        let intended = writers.begin + period * (n as u32 + 1);
        tokio::time::sleep_until((intended - period / 2).into()).await;
        let gate = Arc::new(tokio::sync::Notify::new());
        let ready = Arc::new(AtomicUsize::new(0));
        for i in 0..readers {
            let (index, hot) = (index.clone(), hot.clone());
            let (gate, ready) = (gate.clone(), ready.clone());
            running.push(tokio::spawn(async move {
                let prompt = hot.prefix(n + i).local.clone();
                let wait = gate.notified();
                tokio::pin!(wait);
                wait.as_mut().enable();
                ready.fetch_add(1, Ordering::Relaxed);
                wait.await;
                let begin = Instant::now();
                let scores = index.ask(prompt).await;
                let end = Instant::now();
                (
                    nanoseconds(intended, end),
                    nanoseconds(begin, end),
                    hot.right(&scores),
                )
            }));
        }
        while ready.load(Ordering::Relaxed) < readers {
            tokio::time::sleep(Duration::from_millis(1)).await
        }
        tokio::time::sleep_until((intended - Duration::from_millis(2)).into()).await;
        while Instant::now() < intended {
            tokio::task::yield_now().await
        }
        released.push(nanoseconds(intended, Instant::now()));
        gate.notify_waiters();
    }
    let (mut latency, mut service, mut wrong) = (vec![], vec![], 0);
    for task in running {
        let result = task.await.unwrap();
        latency.push(result.0);
        service.push(result.1);
        wrong += !result.2 as u64;
    }
    let events = writers.stop().await;
    json!({"latency": quantiles(latency), "service": quantiles(service), "wrong": wrong,
        "released_late": quantiles(released), "events": events})
}

/// Readers that ask in a loop beside writers.
async fn closed(a: Arguments) -> Value {
    let mut hot = HotSet::new(&a);
    let index = Index::new();
    hot.fill(&index, a.get("filler", 150_000)).await;
    let hot = Arc::new(hot);
    let writers = Writers::start(&index, &hot, a.get("events", 2000)).await;
    let stop = Arc::new(AtomicBool::new(false));
    let begin = Instant::now();
    let readers: Vec<_> = (0..a.get("readers", 64))
        .map(|first| {
            let (index, hot, stop) = (index.clone(), hot.clone(), stop.clone());
            tokio::spawn(async move {
                let (mut each, mut wrong) = (Vec::with_capacity(200_000), 0);
                let mut i = first;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..16 {
                        let from = Instant::now();
                        let scores = index.direct(&hot.prefix(i).local);
                        each.push(nanoseconds(from, Instant::now()));
                        wrong += (scores.scores.len() != hot.holders) as u64;
                        i += 1;
                    }
                    tokio::task::yield_now().await;
                }
                (each, wrong)
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(a.get("ms", 700) as u64)).await;
    stop.store(true, Ordering::Relaxed);
    let elapsed = begin.elapsed().as_secs_f64();
    let (mut each, mut wrong) = (vec![], 0);
    for reader in readers {
        let result = reader.await.unwrap();
        each.extend(result.0);
        wrong += result.1;
    }
    let events = writers.stop().await;
    json!({"lookups_per_s": each.len() as f64 / elapsed, "latency": quantiles(each),
        "wrong": wrong, "events": events})
}

/// The n-th of the chains that fill an index, on as many pods as are asked for.
async fn add(index: &Index, n: usize, blocks: usize, holders: usize) {
    let chain = Chain::new((n * blocks) as u64, blocks);
    for h in 0..holders {
        let pod = (n % HOT_PREFIXES * PODS / HOT_PREFIXES + h) % PODS;
        index.apply(chain.stored(pod, 0, blocks)).await;
    }
    if n % 16 == 0 {
        index.flush().await;
    }
}

/// An index full of chains, each asked for once in random order: no cache holds them.
async fn cold(a: Arguments) -> Value {
    let (blocks, holders) = (a.get("blocks", 263), a.get("holders", 10));
    let count = a.get("keys", 1_000_000) / blocks;
    let index = Index::new();
    for n in 0..count {
        add(&index, n, blocks, holders).await;
    }
    index.flush().await;
    let mut random = Random(1);
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        order.swap(i, random.below(i + 1));
    }
    let (mut each, mut wrong) = (vec![], 0);
    for batch in order.chunks(16) {
        let prompts: Vec<Vec<LocalBlockHash>> = batch
            .iter()
            .map(|n| {
                (0..blocks)
                    .map(|i| LocalBlockHash(mix((n * blocks + i) as u64)))
                    .collect()
            })
            .collect();
        for prompt in &prompts {
            let from = Instant::now();
            let scores = index.direct(prompt);
            each.push(nanoseconds(from, Instant::now()));
            let right = scores.scores.len() == holders
                && scores.scores.values().all(|&n| n as usize == blocks);
            wrong += !right as u64;
        }
    }
    json!({"latency": quantiles(each), "wrong": wrong})
}

async fn memory(a: Arguments) -> Value {
    let (blocks, holders) = (FILLER_BLOCKS, a.get("holders", 10));
    let count = a.get("keys", 1_000_000) / blocks;
    let index = Index::new();
    index.flush().await;
    let before = rss();
    for n in 0..count {
        add(&index, n, blocks, holders).await;
    }
    index.flush().await;
    unsafe { libc::malloc_trim(0) };
    let bytes = (rss() - before) as f64 / (count * blocks) as f64;
    let scores = index.ask(Chain::new(0, blocks).local).await;
    json!({"bytes_per_block": bytes, "wrong": (scores.scores.len() != holders) as u64})
}

fn main() {
    let kind = std::env::args()
        .nth(1)
        .expect("usage: dynbench KIND name=value ...");
    let pairs = std::env::args().skip(2).map(|pair| {
        let (name, value) = pair.split_once('=').expect("name=value");
        (name.to_string(), value.parse().expect("a number"))
    });
    let a = Arguments(pairs.collect());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_time()
        .build()
        .unwrap();
    let result = runtime.block_on(async {
        let trial = match kind.as_str() {
            "lookup" => tokio::spawn(lookup(a)),
            "burst" => tokio::spawn(burst(a)),
            "loop" => tokio::spawn(closed(a)),
            "cold" => tokio::spawn(cold(a)),
            "memory" => tokio::spawn(memory(a)),
            _ => panic!("no kind is named {kind}"),
        };
        trial.await.unwrap()
    });
    println!("{result}");
    std::process::exit(0) // without the time to take the tree apart
}
