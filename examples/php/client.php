<?php
// Schedules COUNT timers over HTTP, receives and acks them, and continues through failovers.
//
//   php client.php http://HOST:PORT,http://HOST:PORT,… TOPIC GROUP COUNT
//
// Prints "scheduled N" when N timers are scheduled, and "acked N" after N messages are acked. With
// TLS, the variables TIMERCTL_TLS_CA, TIMERCTL_TLS_CERT and TIMERCTL_TLS_KEY name the files.
declare(strict_types=1);

const CALL_S = 40; // of one attempt: a node answers a receive within 35 s, and others within 15 s
const GIVE_UP_S = 60; // of all attempts of a call

/** A cluster: each call goes to one node, and to the next one after a failure that may pass. */
final class Cluster
{
    private int $at = 0;
    private CurlHandle $curl; // keeps its connections

    public function __construct(private array $nodes)
    {
        $this->curl = curl_init();
    }

    /** Send a request that may be repeated; return its answer. */
    public function call(string $path, array $body, array $headers = []): array
    {
        $end = time() + GIVE_UP_S;
        for (;;) {
            curl_setopt_array($this->curl, [
                CURLOPT_URL => $this->nodes[$this->at % count($this->nodes)] . $path,
                CURLOPT_POSTFIELDS => json_encode((object) $body, JSON_THROW_ON_ERROR),
                CURLOPT_HTTPHEADER => ['Content-Type: application/json', ...$headers],
                CURLOPT_RETURNTRANSFER => true,
                CURLOPT_TIMEOUT => CALL_S,
            ] + self::tls());
            $text = curl_exec($this->curl);
            $answer = $text === false ? null : json_decode($text, true);
            if (curl_getinfo($this->curl, CURLINFO_RESPONSE_CODE) === 200 && is_array($answer)) {
                return $answer;
            }
            $passes = !isset($answer['reason']) || $answer['retryable'] || !$answer['outcome_known'];
            if (!$passes || time() > $end) {
                throw new RuntimeException($answer['detail'] ?? curl_error($this->curl));
            }
            $this->at += 1;
            usleep(($answer['retry_after_ms'] ?? 200) * 1000);
        }
    }

    private static function tls(): array
    {
        if (!($ca = getenv('TIMERCTL_TLS_CA'))) {
            return [];
        }
        return [
            CURLOPT_CAINFO => $ca,
            CURLOPT_SSLCERT => getenv('TIMERCTL_TLS_CERT'),
            CURLOPT_SSLKEY => getenv('TIMERCTL_TLS_KEY'),
        ];
    }
}

function schedule(Cluster $cluster, string $topic, int $count): void
{
    for ($n = 0; $n < $count; $n++) {
        $timer = ['json' => ['number' => $n], 'delay' => 1, 'headers' => ['language' => 'php']];
        $key = bin2hex(random_bytes(16)); // a repetition schedules nothing more
        $cluster->call("/v1/topics/$topic/timers", $timer, ["Idempotency-Key: $key"]);
        echo 'scheduled ', $n + 1, "\n";
    }
}

function consume(Cluster $cluster, string $topic, string $group, int $count): void
{
    $at = "/v1/topics/$topic/groups/$group";
    $seen = []; // messages may come again: each counts once
    while (count($seen) < $count) {
        $answer = $cluster->call("$at/receive", ['max_messages' => 16, 'wait' => 2]);
        if (!$answer['messages']) {
            continue;
        }
        $offsets = array_column($answer['messages'], 'queue_offset');
        $held = ['lease_id' => $answer['lease_id'], 'offsets' => $offsets];
        foreach ($cluster->call("$at/ack", $held)['results'] as $i => $result) {
            if ($result === 'ACKED' || $result === 'ALREADY_ACKED') {
                $seen[$answer['messages'][$i]['json']['number']] = true;
            }
        }
        echo 'acked ', count($seen), "\n";
    }
}

[, $nodes, $topic, $group, $count] = $argv;
$cluster = new Cluster(explode(',', $nodes));
schedule($cluster, rawurlencode($topic), (int) $count);
consume($cluster, rawurlencode($topic), rawurlencode($group), (int) $count);
