# Schedules COUNT timers over HTTP, receives and acks them, and continues through failovers.
#
#   ruby client.rb http://HOST:PORT,http://HOST:PORT,… TOPIC GROUP COUNT
#
# Prints "scheduled N" when N timers are scheduled, and "acked N" after N messages are acked. With
# TLS, the variables TIMERCTL_TLS_CA, TIMERCTL_TLS_CERT and TIMERCTL_TLS_KEY name the files.
require "json"
require "net/http"
require "openssl"
require "securerandom"

CALL_S = 40 # of one attempt: a node answers a receive within 35 s, and others within 15 s
GIVE_UP_S = 60 # of all attempts of a call
LOST = [SystemCallError, IOError, SocketError, Timeout::Error, OpenSSL::SSL::SSLError,
        Net::ProtocolError, JSON::ParserError].freeze

# A cluster: each call goes to one node, and to the next one after a failure that may pass.
class Cluster
  def initialize(nodes)
    @nodes = nodes.map { |each| connection(URI(each)) }
    @at = 0
  end

  # Send a request that may be repeated; return its answer.
  def call(path, body, headers = {})
    give_up = Time.now + GIVE_UP_S
    loop do
      failure, pause_s = attempt(path, body, headers) { |answer| return answer }
      raise failure if pause_s.nil? || Time.now > give_up

      @at += 1
      sleep(pause_s)
    end
  end

  private

  # Yield the answer, or return an error and the pause before a repetition; nil: do not repeat it.
  def attempt(path, body, headers)
    node = @nodes[@at % @nodes.size]
    node.start unless node.started? # keeps its connection
    answer = node.post(path, body.to_json, { "Content-Type" => "application/json", **headers })
    found = JSON.parse(answer.body)
    yield found if answer.is_a?(Net::HTTPOK)
    passes = found["retryable"] || !found["outcome_known"]
    [RuntimeError.new(found["detail"]), passes ? (found["retry_after_ms"] || 200) / 1000.0 : nil]
  rescue *LOST => e
    node.finish if node.started?
    [e, 0.2]
  end

  def connection(uri)
    made = Net::HTTP.new(uri.host, uri.port)
    made.read_timeout = CALL_S
    made.max_retries = 0
    made.use_ssl = uri.scheme == "https"
    if (ca = ENV["TIMERCTL_TLS_CA"])
      made.ca_file = ca
      made.cert = OpenSSL::X509::Certificate.new(File.read(ENV.fetch("TIMERCTL_TLS_CERT")))
      made.key = OpenSSL::PKey.read(File.read(ENV.fetch("TIMERCTL_TLS_KEY")))
    end
    made
  end
end

def schedule(cluster, topic, count)
  count.times do |n|
    timer = { json: { number: n }, delay: 1, headers: { language: "ruby" } }
    named = { "Idempotency-Key" => SecureRandom.uuid } # a repetition schedules nothing more
    cluster.call("/v1/topics/#{topic}/timers", timer, named)
    puts "scheduled #{n + 1}"
  end
end

def consume(cluster, topic, group, count)
  at = "/v1/topics/#{topic}/groups/#{group}"
  seen = {} # messages may come again: each counts once
  while seen.size < count
    answer = cluster.call("#{at}/receive", { max_messages: 16, wait: 2 })
    messages = answer["messages"]
    next if messages.empty?

    held = { lease_id: answer["lease_id"], offsets: messages.map { |each| each["queue_offset"] } }
    cluster.call("#{at}/ack", held)["results"].zip(messages) do |result, message|
      seen[message["json"]["number"]] = true if %w[ACKED ALREADY_ACKED].include?(result)
    end
    puts "acked #{seen.size}"
  end
end

$stdout.sync = true
nodes, topic, group, count = ARGV
cluster = Cluster.new(nodes.split(","))
topic, group = [topic, group].map { |each| URI.encode_www_form_component(each).gsub("+", "%20") }
schedule(cluster, topic, count.to_i)
consume(cluster, topic, group, count.to_i)
